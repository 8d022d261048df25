"""The weight of a late contribution, and the lag allowed to each worker. Lag: the newest version minus the one it was computed on."""

from __future__ import annotations

_LEAST_BOUND = 2


def weight(lag: int) -> float:
    """The share of a contribution that is applied: 1 for a fresh one, 1/2 for one that is a version behind."""
    return 1.0 / (1 + lag)


def bound_for(workers: int, per_version: int) -> int:
    """The largest accepted lag where none is configured: while one of equally fast workers computes, the others make this many versions."""
    return max(_LEAST_BOUND, -(-workers // per_version))


def adaptive_bound(max_staleness: int, speed: float, min_staleness: int, multiplier: float) -> float:
    """The largest accepted lag of a worker's contributions. Slow workers may lag more, so that their work is not always lost."""
    most = max_staleness * multiplier
    wanted = max_staleness / speed if speed > 0 else most
    return min(max(wanted, min_staleness), most)
