"""The weight of a late contribution, and the lag allowed to each worker. Lag: the newest version minus the one it was computed on."""

from __future__ import annotations

_LEAST_BOUND = 2
_TIMES_AS_MANY = 4
"""Versions that may be made while a worker computes, as a multiple of what equally fast workers make. Workers that begin together finish
together: that doubles the versions within one unit. In a class of speeds 1:2:4 the slowest third lags 2.3 times as much. With a multiple of
1, a class of 30 equal students lost 6 % of its units, and one of speeds 1:2:4 lost 14 % (benchmarks/classroom_late.py)."""


def weight(lag: int) -> float:
    """The share of a contribution that is applied: 1 for a fresh one, 1/2 for one that is a version behind."""
    return 1.0 / (1 + lag)


def bound_for(workers: int, per_version: int) -> int:
    """The largest accepted lag where none is configured. While one of equally fast workers computes, the others make workers over
    `per_version` versions; slower workers and bursts of results need more."""
    return max(_LEAST_BOUND, -(-_TIMES_AS_MANY * workers // per_version))


def adaptive_bound(max_staleness: int, speed: float, min_staleness: int, multiplier: float) -> float:
    """The largest accepted lag of a worker's contributions. Slow workers may lag more, so that their work is not always lost."""
    most = max_staleness * multiplier
    wanted = max_staleness / speed if speed > 0 else most
    return min(max(wanted, min_staleness), most)
