"""Consecutive layers over machines of different speed: the slowest stage is as quick as it can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from shoal.errors import ShoalError


def split(
    costs: Sequence[float],
    speeds: Sequence[float],
    *,
    before: float = 0.0,
    after: float = 0.0,
    sizes: Sequence[float] | None = None,
    rooms: Sequence[float] | None = None,
) -> list[int]:
    """The bounds of each machine's layers: machine i has the layers [bounds[i], bounds[i + 1]), at least one.

    The time of a stage is the cost of its layers over its machine's speed; `before` and `after` are what the first and the last machine do
    besides. No machine has layers that are larger than its room: `sizes` of each layer, `rooms` of each machine. Of all splits the one
    whose slowest stage takes least is found, not an approximation of it. Raises ShoalError where there is none.
    """
    count, machines = len(costs), len(speeds)
    if machines > count:
        raise ShoalError(f"{machines} stages need at least one layer each, and the model has {count}")
    ahead, taken = [0.0, *accumulate(costs)], [0.0, *accumulate(sizes or [0.0] * count)]

    def time_of(machine: int, first: int, last: int) -> float:
        if rooms is not None and taken[last] - taken[first] > rooms[machine]:
            return math.inf
        extra = (before if first == 0 else 0.0) + (after if last == count else 0.0)
        return (ahead[last] - ahead[first] + extra) / speeds[machine]

    # best[end]: the slowest stage and the bounds, if the machines so far have the layers up to `end`
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for machine in range(machines):
        found: dict[int, tuple[float, list[int]]] = {}
        for start, (slowest, bounds) in best.items():
            for end in range(start + 1, count - (machines - machine - 1) + 1):
                time = max(slowest, time_of(machine, start, end))
                if time < found.get(end, (math.inf, []))[0]:
                    found[end] = (time, [*bounds, end])
        best = found
    if count not in best:
        raise ShoalError("the model does not fit the memory of these machines: take more of them, or a smaller model")
    return best[count][1]
