"""Elastic and asynchronous: every gradient is applied when it arrives, scaled by 1/(1+lag); workers come and go.

Where workers pull at every step they look ahead, as under async.

Holds: the lag of a gradient is the versions its weights do not know of. A worker steps its own weights between pulls, so those it made
itself do not count. A rule that needs several contributions gets the latest of that many workers.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import Edp
from shoal.coordinator import Every, Policy
from shoal.updates.staleness import weight


def policy(run: Run, expected: int) -> Policy:
    settings = run.strategy
    assert isinstance(settings, Edp)
    return Policy(
        rounds=Every(1 if run.updates.aggregation.kind == "mean" else expected),
        admission=lambda lag, speed: weight(lag),
        pull_every=settings.pull_every_steps,
        worker_steps=True,
        look_ahead=bool(settings.look_ahead),
    )
