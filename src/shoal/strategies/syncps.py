"""Synchronous parameter server: a round closes when every live worker has sent, or at its deadline.

Holds: a worker that is late is left out of the round, not of the run. With the mean and no blending, a round of N workers is one step of
one process with all N batches.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import SyncPs
from shoal.coordinator import Barrier
from shoal.strategies.policy_set import Policies
from shoal.strategies.run_length import in_updates
from shoal.worker.producers import GradientContribution
from shoal.worker.step_policies import PullPolicy


def policies(run: Run, expected: int) -> Policies:
    settings = run.strategy
    assert isinstance(settings, SyncPs)
    blend = 1.0 if run.training.polyak_alpha is None else run.training.polyak_alpha
    rounds = Barrier(deadline_s=settings.round_timeout_s, window=settings.window)
    return Policies(
        rounds=rounds,
        length=in_updates(run, rounds),
        contribution=GradientContribution(
            own_steps=settings.pull_every_steps > 1 or blend < 1
        ),  # else its own steps would be overwritten at once
        pull=PullPolicy(every=settings.pull_every_steps, blend=blend),
    )
