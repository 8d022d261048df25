"""Thousands of bad days for the pure coordinator, of each strategy: many more than fit into the ordinary tests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fault_schedules import SCHEDULE, STRATEGIES, examples, live_through


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STRATEGIES)
@examples(1000)
@given(schedule=SCHEDULE, workers=st.integers(1, 4), steps=st.sampled_from([4, 10**6]))
def test_thousands_of_schedules(name: str, schedule: list[tuple[str, int]], workers: int, steps: int) -> None:
    live_through(name, schedule, workers, steps)
