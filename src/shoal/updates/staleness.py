"""How much a late contribution counts, and how late each worker may be. Lag is versions: the newest less the one it was computed on."""

from __future__ import annotations


def weight(lag: int) -> float:
    """The share of a contribution that is applied: all of a fresh one, half of one that is a version behind."""
    return 1.0 / (1 + lag)


def adaptive_bound(max_staleness: int, speed: float, min_staleness: int, multiplier: float) -> float:
    """The lag up to which a worker's contributions are taken: a slow worker gets more room, so that its work is not always lost."""
    most = max_staleness * multiplier
    wanted = max_staleness / speed if speed > 0 else most
    return min(max(wanted, min_staleness), most)
