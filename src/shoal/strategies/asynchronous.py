"""Bounded staleness: a gradient that lags too many versions is rejected; slower workers may lag more.

Holds: lag is versions, the newest less the one the gradient was computed on, so N equal workers lag about N each, and none is rejected.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import Async
from shoal.coordinator import Bounded, Every
from shoal.strategies.policy_set import Policies
from shoal.strategies.run_length import in_updates
from shoal.worker.step_policies import PullPolicy


def policies(run: Run, expected: int) -> Policies:
    settings = run.strategy
    assert isinstance(settings, Async)
    rounds = Every(settings.contributions_per_update, different=run.updates.compares)
    least = settings.max_staleness if settings.min_staleness is None else settings.min_staleness
    return Policies(
        rounds=rounds,
        length=in_updates(run, rounds),
        admission=Bounded(settings.max_staleness, least if settings.adaptive else None, settings.max_staleness_multiplier),
        pull=PullPolicy(look_ahead=settings.look_ahead),
    )
