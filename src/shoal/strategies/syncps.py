"""Synchronous parameter server: a round closes when every live worker has sent, or at its deadline.

Holds: who is late is left out of the round, not of the run. With the mean and no blending, a round of N workers is one step of one process
with all N batches.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import SyncPs
from shoal.coordinator import Barrier, Policy


def policy(run: Run, expected: int) -> Policy:
    settings = run.strategy
    assert isinstance(settings, SyncPs)
    blend = 1.0 if run.training.polyak_alpha is None else run.training.polyak_alpha
    return Policy(
        rounds=Barrier(settings.round_timeout_s, settings.window),
        admission=lambda lag, speed: 1.0,
        pull_every=settings.pull_every_steps,
        blend=blend,
        worker_steps=settings.pull_every_steps > 1 or blend < 1,  # else its own steps would be overwritten at once
    )
