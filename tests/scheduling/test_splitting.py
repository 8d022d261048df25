"""Layers over machines: the split whose slowest machine takes least, against all splits that there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.scheduling.splitting import split


def slowest(bounds: list[int], costs: list[float], speeds: list[float], before: float, after: float) -> float:
    extra = [before, *[0.0] * (len(speeds) - 1)]
    extra[-1] += after
    return max((sum(costs[first:last]) + more) / speed for (first, last), speed, more in zip(pairwise(bounds), speeds, extra, strict=True))


@given(st.data())
def test_no_other_split_is_quicker(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0.1, 10), min_size=1, max_size=7))
    speeds = data.draw(st.lists(st.floats(0.1, 4), min_size=1, max_size=len(costs)))
    before, after = data.draw(st.tuples(st.floats(0, 5), st.floats(0, 5)))
    found = slowest(split(costs, speeds, before=before, after=after), costs, speeds, before, after)
    every = ([0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), len(speeds) - 1))
    assert found == pytest.approx(min(slowest(bounds, costs, speeds, before, after) for bounds in every))


def test_memory_is_a_cap_and_a_model_that_fits_nowhere_is_refused() -> None:
    costs, sizes = [1.0] * 6, [1.0] * 6
    assert split(costs, [10.0, 1.0, 1.0], sizes=sizes, rooms=[6.0, 6.0, 6.0]) == [0, 4, 5, 6]
    assert split(costs, [10.0, 1.0, 1.0], sizes=sizes, rooms=[2.0, 6.0, 6.0]) == [0, 2, 4, 6]
    with pytest.raises(ShoalError, match="does not fit the memory"):
        split(costs, [1.0, 1.0], sizes=sizes, rooms=[2.0, 2.0])
    with pytest.raises(ShoalError, match="the model has 2"):
        split([1.0, 1.0], [1.0] * 3)
