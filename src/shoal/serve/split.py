"""Which machine gets which layers: the split whose slowest machine is as quick as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple


class Hands(NamedTuple):
    """What one machine can do."""

    name: str
    layer_s: float
    """Time for one layer of mean size, as it was measured."""
    memory_bytes: float = math.inf
    """For weights and caches."""
    fixed_s: float = 0.0
    """Time for what it does beside its layers: the server has the embedding and the head."""


class Stop(NamedTuple):
    """The layers [first, last) at a machine."""

    name: str
    first: int
    last: int


def split(machines: Sequence[Hands], sizes: Sequence[float], layer_bytes: Sequence[float]) -> list[Stop] | None:
    """The stops in order of the layers; a machine that would only slow the others down has none. None: there is not enough memory.

    Exact: every contiguous split in the order of the machines is considered, by dynamic programming. `sizes` are the layers' shares of the
    work. Of splits that are equally quick, the one with the fewest stops is taken: each costs a way over the network.
    """
    mean = sum(sizes) / len(sizes)
    time_before, bytes_before = _sums([size / mean for size in sizes]), _sums(layer_bytes)
    count = len(sizes)
    # best[l]: (slowest machine, stops) of the machines so far with the first l layers, and the stops themselves
    best: list[tuple[tuple[float, int], list[Stop]] | None] = [((0.0, 0), []), *[None] * count]
    for machine in machines:
        after = [_with_nothing(entry, machine) for entry in best]
        for first, last in combinations(range(count + 1), 2):
            before = best[first]
            if before is None or bytes_before[last] - bytes_before[first] > machine.memory_bytes:
                continue
            slowest = max(before[0][0], machine.fixed_s + machine.layer_s * (time_before[last] - time_before[first]))
            cost, known = (slowest, before[0][1] + 1), after[last]
            if known is None or cost < known[0]:
                after[last] = (cost, [*before[1], Stop(machine.name, first, last)])
        best = after
    found = best[count]
    return found[1] if found is not None else None


def slowest_s(stops: Sequence[Stop], machines: Sequence[Hands]) -> float:
    """How long the slowest machine of a split takes, for layers of mean size."""
    by_name = {machine.name: machine for machine in machines}
    return max(by_name[stop.name].fixed_s + by_name[stop.name].layer_s * (stop.last - stop.first) for stop in stops)


def _with_nothing(entry: tuple[tuple[float, int], list[Stop]] | None, machine: Hands) -> tuple[tuple[float, int], list[Stop]] | None:
    """The machine gets no layers; what it does beside them still takes its time."""
    if entry is None:
        return None
    (slowest, stops), made = entry
    return (max(slowest, machine.fixed_s), stops), made


def _sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
