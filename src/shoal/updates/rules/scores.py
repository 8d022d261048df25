"""Scores of contributions: how much each lowers the loss on held-out data, and how much its worker's contributions therefore count.

In a measured round each worker's improvement is divided by the median of the improvements above zero. A worker's score is the running mean
of these quotients, and its contributions count by that, from 0 to 1. Contributions that are copies of one another count as one together:
their distance is a small part of the usual one, among those that lower the loss. All of it is arithmetic of Python's floats, so a replay
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from torch import Tensor

from shoal.updates.rules.gram_matrix import gram, squared_distances

COPY = 0.05
"""Two contributions are copies if the square of their distance is below this share of the median one."""
LEAST_FACTOR = 0.1
"""Contributions that would count less are left out."""
_RANGE = -1.0, 2.0
"""Bounds of a measured quotient, so that no single measurement decides for long."""


class Score(NamedTuple):
    """A worker's running mean, and the number of measurements in it."""

    value: float
    measured: int


class HeldOutLosses(NamedTuple):
    """What was measured in a round."""

    batches: list[int]
    """Numbers of the held-out batches."""
    before: float
    """The loss with the round's weights."""
    after: list[float]
    """The loss with each contribution alone, in the order of the contributions."""
    copies: list[list[int]]
    """Groups of contributions that are copies of one another, by their place in that order."""


def copies(stack_ND: Tensor) -> list[list[int]]:
    """Groups of rows that are copies of one another. With fewer than three rows no distance is the usual one."""
    count = len(stack_ND)
    if count < 3:
        return []
    distances = squared_distances(gram(stack_ND)).tolist()
    usual = median(distances[i][j] for i in range(count) for j in range(i))
    groups: list[list[int]] = []
    for row in range(count):
        for group in groups:
            if distances[group[0]][row] < COPY * usual:
                group.append(row)
                break
        else:
            groups.append([row])
    return [group for group in groups if len(group) > 1]


def improvements(measured: HeldOutLosses, workers: Sequence[str]) -> dict[str, float]:
    """By worker: the mean improvement of its contributions, of which copies have a share each. Empty where none lowers the loss: then the
    measurement says nothing about the differences between workers."""
    gains: dict[str, list[float]] = {}
    shared: dict[str, list[float]] = {}
    sharers = {place: len({workers[other] for other in group}) for group in measured.copies for place in group}
    for place, worker in enumerate(workers):
        gain = measured.before - measured.after[place]
        gains.setdefault(worker, []).append(gain)
        part = sharers.get(place, 1)  # 1 where a worker sends the same twice
        shared.setdefault(worker, []).append(gain / part if gain > 0 else gain)
    usual = [mean for mean in map(fmean, gains.values()) if mean > 0]
    if not usual:
        return {}
    (low, high), middle = _RANGE, median(usual)
    return {worker: min(high, max(low, fmean(found) / middle)) for worker, found in shared.items()}


def renewed(scores: Mapping[str, Score], measured: Mapping[str, float], memory: float) -> dict[str, Score]:
    """The workers' scores after a measurement. The first ones count in full, then the running mean begins to forget."""
    new = dict(scores)
    for worker, value in measured.items():
        before = new.pop(worker, Score(0.0, 0))
        step = max(1 / (before.measured + 1), 1 - memory)
        new[worker] = Score(before.value + step * (value - before.value), before.measured + 1)
    return new


def factors(scores: Mapping[str, Score], workers: Sequence[str]) -> dict[str, float]:
    """By worker whose contributions count less than in full: by how much. Empty where none would count."""
    found = {worker: min(1.0, max(0.0, scores[worker].value)) if worker in scores else 1.0 for worker in dict.fromkeys(workers)}
    found = {worker: factor if factor >= LEAST_FACTOR else 0.0 for worker, factor in found.items()}
    return {worker: factor for worker, factor in found.items() if factor < 1} if any(found.values()) else {}
