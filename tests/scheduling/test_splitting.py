"""Layers over machines: the split whose slowest machine takes least, against all splits that there are."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.scheduling.layer_split import MachineSpec, split

MACHINE = st.builds(MachineSpec, st.floats(0.1, 4), st.sampled_from([float("inf"), 6.0, 3.0]), st.sampled_from([0.0, 1.0]))


def slowest(bounds: list[int], costs: list[float], machines: list[MachineSpec], before: float, after: float) -> float:
    """The time of the slowest machine; infinite where one has too little memory for its layers. Layers are as large as they are costly."""
    found = 0.0
    for (first, last), machine in zip(pairwise(bounds), machines, strict=True):
        extra = (before if first == 0 and last > 0 else 0.0) + (after if last == len(costs) and first < last else 0.0)
        fits = sum(costs[first:last]) <= machine.capacity
        found = max(found, machine.fixed_s + (sum(costs[first:last]) + extra) / machine.speed if fits else float("inf"))
    return found


@given(st.data())
def test_no_other_split_is_quicker(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 5).map(float), min_size=1, max_size=7))
    leave_out = data.draw(st.booleans())
    machines = data.draw(st.lists(MACHINE, min_size=1, max_size=4 if leave_out else min(4, len(costs))))
    before, after = data.draw(st.tuples(st.floats(0, 5), st.floats(0, 5)))
    every = [[0, *inner, len(costs)] for inner in combinations_with_replacement(range(len(costs) + 1), len(machines) - 1)]
    if not leave_out:
        every = [bounds for bounds in every if all(first < last for first, last in pairwise(bounds))]
    best = min(slowest(bounds, costs, machines, before, after) for bounds in every)
    if best == float("inf"):
        with pytest.raises(ShoalError, match="does not fit the memory"):
            split(costs, machines, before=before, after=after, sizes=costs, leave_out=leave_out)
        return
    bounds = split(costs, machines, before=before, after=after, sizes=costs, leave_out=leave_out)
    assert slowest(bounds, costs, machines, before, after) == pytest.approx(best)


def test_memory_is_a_cap_and_a_model_that_fits_nowhere_is_refused() -> None:
    costs = [1.0] * 6
    assert split(costs, [MachineSpec(10.0, 6.0), MachineSpec(1.0, 6.0), MachineSpec(1.0, 6.0)], sizes=costs) == [0, 4, 5, 6]
    assert split(costs, [MachineSpec(10.0, 2.0), MachineSpec(1.0, 6.0), MachineSpec(1.0, 6.0)], sizes=costs) == [0, 2, 4, 6]
    with pytest.raises(ShoalError, match="does not fit the memory"):
        split(costs, [MachineSpec(1.0, 2.0), MachineSpec(1.0, 2.0)], sizes=costs)
    with pytest.raises(ShoalError, match="the model has 2"):
        split([1.0, 1.0], [MachineSpec(1.0)] * 3)


def test_a_weak_machine_is_left_out_where_that_is_allowed() -> None:
    costs = [1.0] * 12
    assert split(costs, [MachineSpec(1.0), MachineSpec(0.01), MachineSpec(1.0)], leave_out=True) == [0, 6, 6, 12]
    assert split([1.0], [MachineSpec(1.0), MachineSpec(1.0)], leave_out=True)[-1] == 1


@given(st.lists(st.integers(1, 5).map(float), min_size=1, max_size=9), st.integers(1, 5))
def test_an_even_split_leaves_out_no_machine_and_is_as_even_as_any(costs: list[float], count: int) -> None:
    machines = [MachineSpec(1.0)] * count
    bounds = split(costs, machines, leave_out=True, even=True)
    every = [[0, *inner, len(costs)] for inner in combinations_with_replacement(range(len(costs) + 1), count - 1)]
    assert sum(first < last for first, last in pairwise(bounds)) == min(count, len(costs))
    assert squares(bounds, costs) == min(squares(other, costs) for other in every)


def squares(bounds: list[int], costs: list[float]) -> float:
    return sum(sum(costs[first:last]) ** 2 for first, last in pairwise(bounds))


def test_an_even_split_gives_a_machine_no_more_than_it_holds() -> None:
    machines = [MachineSpec(1.0), MachineSpec(1.0, 2.0), MachineSpec(1.0)]
    assert split([1.0] * 12, machines, sizes=[1.0] * 12, leave_out=True, even=True) == [0, 5, 7, 12]
