"""Any order of messages, losses, doubles, deaths, crashes, disk faults, clock jumps: what was confirmed is in the weights once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fault_schedules import DISK, LIKELY, SCHEDULE, STRATEGIES, WRONG, examples, live_through


@pytest.mark.parametrize("name", STRATEGIES)
@examples(20)
@given(schedule=SCHEDULE, workers=st.integers(1, 4), steps=st.sampled_from([4, 10**6]))
def test_whatever_happens_nothing_confirmed_is_lost_or_doubled(
    name: str, schedule: list[tuple[str, int]], workers: int, steps: int
) -> None:
    live_through(name, schedule, workers, steps)


@pytest.mark.whole
def test_the_schedules_are_as_hard_as_they_claim() -> None:
    """All that can go wrong does go wrong in them."""
    crashes, confirmed, several, outcomes = 0, 0, 0, set[str]()
    for seed in range(25):
        chance = random.Random(seed)
        schedule = [(chance.choice(LIKELY + WRONG + DISK * (seed % 2)), chance.randrange(12)) for _ in range(100)]
        world = live_through(chance.choice(list(STRATEGIES)), schedule, 3, 10**6)
        crashes, confirmed = crashes + world.crashes, confirmed + len(world.confirmed)
        outcomes |= world.coordinator.state.contributions.keys()
        rows = [[one[0] for one in line["from"]] for line in world.disk.ledger if "version" in line]
        several += sum(len(set(workers)) < len(workers) for workers in rows)
    assert crashes > 200
    assert confirmed > 400
    assert several > 5, "some workers have more than one contribution in a version"
    assert outcomes >= {"accepted", "late"}
