"""How much a late contribution counts, and how late each worker may be. Lag is versions: the newest less the one it was computed on."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median


def weight(lag: int) -> float:
    """The share of a contribution that is applied: all of a fresh one, half of one that is a version behind."""
    return 1.0 / (1 + lag)


def adaptive_bound(max_staleness: int, speed: float, min_staleness: int, multiplier: float) -> float:
    """The lag up to which a worker's contributions are taken: a slow worker gets more room, so that its work is not always lost."""
    most = max_staleness * multiplier
    wanted = max_staleness / speed if speed > 0 else most
    return min(max(wanted, min_staleness), most)


def relative_speeds(rates: Mapping[str, float]) -> dict[str, float]:
    """Each worker's rate over the median rate; 1 for all while nobody has been seen to move."""
    middle = median(rates.values()) if rates else 0.0
    return {worker: rate / middle if middle > 0 else 1.0 for worker, rate in rates.items()}
