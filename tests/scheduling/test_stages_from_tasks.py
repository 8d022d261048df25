"""Tasks as stages: shares become whole layers, and every stage has a machine that it fits, or is named with what it lacks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.schema.cluster import ScheduledTask
from shoal.errors import ShoalError
from shoal.scheduling import KINDS, PendingTask, WorkerSpec
from shoal.scheduling.task_stages import bounds_by_share, match_stages, stage_shares


def tasks(*shares: float) -> list[ScheduledTask]:
    return [ScheduledTask(id=f"t{number}", model_share=share, priority=number) for number, share in enumerate(shares)]


def test_the_rest_of_the_model_is_cut_into_stages_no_larger_than_the_largest() -> None:
    parts = stage_shares(tasks(0.2, 0.3))
    assert [part.id for part in parts] == ["t0", "t1", "rest-1", "rest-2"]
    assert [part.share for part in parts] == pytest.approx([0.2, 0.3, 0.25, 0.25])
    assert parts[-1].priority == 0, "no more urgent than any task"


def test_shares_that_were_rounded_are_all_of_the_model() -> None:
    assert [part.share for part in stage_shares(tasks(0.33, 0.33, 0.33))] == pytest.approx([1 / 3] * 3)


def test_bounds_lie_where_the_weights_come_nearest_to_the_shares() -> None:
    assert bounds_by_share([1.0] * 10, [0.3, 0.7]) == [0, 3, 10]
    assert bounds_by_share([1.0] * 10, [0.5, 0.5], before=4.0) == [0, 3, 10], "what stands before the layers is the first stage's"
    assert bounds_by_share([1.0] * 10, [0.5, 0.5], after=4.0) == [0, 7, 10]
    assert bounds_by_share([8.0, 1.0, 1.0], [0.1, 0.1, 0.8]) == [0, 1, 2, 3], "each has a layer"


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ShoalError, match="3 stages need at least one layer each, and the model has 2"):
        bounds_by_share([1.0, 1.0], [0.3, 0.3, 0.4])


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=9), st.lists(st.floats(0.05, 1), min_size=1, max_size=4))
def test_every_stage_has_a_layer_and_every_layer_a_stage(sizes: list[float], shares: list[float]) -> None:
    bounds = bounds_by_share(sizes, [share / sum(shares) for share in shares])
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(sizes), len(shares) + 1)
    assert bounds == sorted(set(bounds))


LARGE, SMALL = PendingTask("large", 7.0, 8.0), PendingTask("small", 3.0, 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_goes_to_a_machine_that_has_the_memory(kind: str) -> None:
    machines = [WorkerSpec("fast", 100.0, 4.0), WorkerSpec("roomy", 1.0, 16.0)]
    assert match_stages([SMALL, LARGE], machines, KINDS[kind]) == {"small": "fast", "large": "roomy"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_urgent_stage_gives_its_machine_up_where_another_fits_nowhere_else(kind: str) -> None:
    urgent = SMALL._replace(priority=9.0)
    machines = [WorkerSpec("roomy", 100.0, 16.0), WorkerSpec("small", 1.0, 4.0)]
    assert match_stages([LARGE, urgent], machines, KINDS[kind]) == {"large": "roomy", "small": "small"}


@pytest.mark.parametrize("kind", ["capability", "gale-shapley"])
def test_the_larger_stage_has_the_faster_of_two_machines_that_it_fits(kind: str) -> None:
    machines = [WorkerSpec("slow", 1.0, 16.0), WorkerSpec("fast", 2.0, 16.0), WorkerSpec("slowest", 0.5, 16.0)]
    assert match_stages([SMALL, LARGE], machines, KINDS[kind]) == {"small": "slow", "large": "fast"}


def test_a_stage_without_a_machine_is_named_with_what_it_lacks() -> None:
    machines = [WorkerSpec("a", 1.0, 4.0), WorkerSpec("b", 1.0, 6.0)]
    with pytest.raises(ShoalError, match="stage `large`: it needs 8 GB of memory, and b, which has the most, has 6"):
        match_stages([SMALL, LARGE], machines, KINDS["priority"])
    with pytest.raises(ShoalError, match="`second`: it needs 8 GB of memory, and b, which has so much, has another stage"):
        match_stages([LARGE, LARGE._replace(id="second")], [machines[0], WorkerSpec("b", 1.0, 9.0)], KINDS["priority"])
    with pytest.raises(ShoalError, match="2 stages need a machine each, and there are 1: none is left for `large`"):
        match_stages([SMALL, LARGE], [WorkerSpec("a")], KINDS["priority"])


def test_a_machine_that_must_have_a_stage_has_the_smallest_that_nobody_else_gave_it() -> None:
    machines = [WorkerSpec("keeper", 0.1, 4.0), WorkerSpec("a", 1.0), WorkerSpec("b", 1.0)]
    assert set(match_stages([SMALL, LARGE], machines, KINDS["gale-shapley"]).values()) == {"a", "b"}
    found = match_stages([SMALL, LARGE], machines, KINDS["gale-shapley"], must_have="keeper")
    assert found["small"] == "keeper"
    assert found["large"] in ("a", "b")
