"""Bounded staleness: a gradient that lags too many versions is rejected; slower workers may lag more.

Holds: lag is versions, the newest less the one the gradient was computed on, so N equal workers lag about N each, and none is rejected.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import Async
from shoal.coordinator import Every, Policy
from shoal.updates.staleness import adaptive_bound


def policy(run: Run, expected: int) -> Policy:
    settings = run.strategy
    assert isinstance(settings, Async)
    least = settings.max_staleness if settings.min_staleness is None else settings.min_staleness

    def bound(speed: float) -> float:
        if not settings.adaptive:
            return settings.max_staleness
        return adaptive_bound(settings.max_staleness, speed, least, settings.max_staleness_multiplier)

    return Policy(
        rounds=Every(settings.contributions_per_update),
        admission=lambda lag, speed: 1.0 if lag <= bound(speed) else 0.0,
        most_lag=bound,
        look_ahead=settings.look_ahead,
    )
