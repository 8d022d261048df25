"""Layers are split so that the slowest machine is as quick as it can be."""

from __future__ import annotations

import itertools
import math
import random

from shoal.serve.split import Hands, split


def brute(machines, sizes, layer_bytes):
    """The slowest machine of the best of all splits in the order of the machines."""
    mean, best = sum(sizes) / len(sizes), math.inf
    for cuts in itertools.combinations_with_replacement(range(len(sizes) + 1), len(machines) - 1):
        bounds = [0, *cuts, len(sizes)]
        slowest = 0.0
        for machine, first, last in zip(machines, bounds, bounds[1:], strict=False):
            if sum(layer_bytes[first:last]) > machine.memory_bytes:
                slowest = math.inf
            slowest = max(slowest, machine.fixed_s + machine.layer_s * sum(sizes[first:last]) / mean)
        best = min(best, slowest)
    return best


def test_the_split_is_the_best_of_all():
    chance = random.Random(1)
    for _ in range(60):
        sizes = [chance.choice([1, 1, 2, 5]) for _ in range(chance.randint(1, 8))]
        machines = [
            Hands(str(i), chance.choice([1.0, 2.0, 4.0, 30.0]), chance.choice([math.inf, 6.0, 3.0]), chance.choice([0.0, 1.0]))
            for i in range(chance.randint(1, 4))
        ]
        stops, best = split(machines, sizes, sizes), brute(machines, sizes, sizes)
        assert (stops is None) == (best == math.inf)
        if stops is not None:
            assert [stop.first for stop in stops] == [0, *(stop.last for stop in stops[:-1])]
            assert stops[-1].last == len(sizes)
            mean, by_name = sum(sizes) / len(sizes), {machine.name: machine for machine in machines}
            taken = [by_name[s.name].fixed_s + by_name[s.name].layer_s * sum(sizes[s.first : s.last]) / mean for s in stops]
            assert math.isclose(max([*taken, *(machine.fixed_s for machine in machines)]), best)


def test_a_weak_machine_is_left_out_and_a_full_one_takes_what_fits():
    equal = [1.0] * 12
    quick, weak = [Hands("a", 1.0), Hands("b", 1.0)], Hands("slow", 100.0)
    assert [stop.name for stop in split([*quick, weak], equal, equal)] == ["a", "b"]
    small = Hands("small", 0.1, memory_bytes=2.0)
    assert [(stop.name, stop.last - stop.first) for stop in split([small, *quick], equal, equal)] == [("small", 2), ("a", 5), ("b", 5)]
