"""Elastic and asynchronous: every gradient is applied when it arrives, scaled by 1/(1+lag); workers come and go.

Workers that pull at every step look ahead, as under async.

Holds: the lag of a gradient is the number of versions that its weights do not include. A worker steps its own weights between pulls, so the
versions made of its own gradients do not count. An aggregation rule that compares workers gets one row per worker, the mean of what it
sent.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import Edp
from shoal.coordinator import Discounted, Every
from shoal.strategies.policy_set import Policies
from shoal.strategies.run_length import in_updates
from shoal.worker.producers import GradientContribution
from shoal.worker.step_policies import PullPolicy


def policies(run: Run, expected: int) -> Policies:
    settings = run.strategy
    assert isinstance(settings, Edp)
    rounds = Every(expected, different=True) if run.updates.compares else Every()
    return Policies(
        rounds=rounds,
        length=in_updates(run, rounds),
        contribution=GradientContribution(own_steps=True),
        admission=Discounted(),
        pull=PullPolicy(every=settings.pull_every_steps, look_ahead=bool(settings.look_ahead)),
    )
