"""Split consecutive layers over machines of different speed: so that the slowest takes the least time, or evenly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from shoal.errors import ShoalError


class MachineSpec(NamedTuple):
    speed: float
    """Layer cost per second."""
    capacity: float = math.inf
    """Total size of the layers that it can hold."""
    fixed_s: float = 0.0
    """Time per pass that does not depend on its layers."""

    def seconds(self, cost: float) -> float:
        return self.fixed_s + cost / self.speed


def split(
    costs: Sequence[float],
    machines: Sequence[MachineSpec],
    *,
    before: float = 0.0,
    after: float = 0.0,
    sizes: Sequence[float] | None = None,
    leave_out: bool = False,
    even: bool = False,
    holds: Callable[[int, int, int], bool] = lambda machine, first, last: True,
) -> list[int]:
    """The bounds of each machine's layers: machine i has the layers [bounds[i], bounds[i + 1]).

    `before` and `after`: additional cost of the machines with the first and the last layer. `holds(machine, first, last)`: whether it can
    hold the layers [first, last), where more than their sizes decides. Each machine gets at least one layer; with `leave_out`, machines
    that would only slow the others down get none. Dynamic programming finds the exact optimum over all splits in the order of the machines;
    of equally fast splits the one with the fewest machines. `even`: the least sum of squared times, so equal machines get equal shares.
    Raises ShoalError where the layers do not fit.
    """
    count = len(costs)
    if len(machines) > count and not leave_out:
        raise ShoalError(f"{len(machines)} stages need at least one layer each, and the model has {count}")
    done, taken = [before, *(before + cost for cost in accumulate(costs))], [0.0, *accumulate(sizes or [0.0] * count)]
    done[0], done[count] = 0.0, done[count] + after
    # best[end], for layers up to `end`: the time of the slowest machine (or the sum of squares), how many have layers, and the bounds
    best: dict[int, tuple[float, int, list[int]]] = {0: (0.0, 0, [0])}
    for number, machine in enumerate(machines):
        found: dict[int, tuple[float, int, list[int]]] = {}
        for start, (slowest, used, bounds) in best.items():
            for end in range(start if leave_out else start + 1, count + 1):
                if taken[end] - taken[start] > machine.capacity or not holds(number, start, end):
                    break
                seconds = machine.seconds(done[end] - done[start])
                time = slowest + seconds**2 if even else max(slowest, seconds)
                entry = (time, used + (end > start), [*bounds, end])
                found[end] = min(found.get(end, entry), entry, key=lambda one: one[:2])
        best = found
    if count not in best:
        raise ShoalError("the model does not fit the memory of these machines: take more of them, or a smaller model")
    return best[count][2]
