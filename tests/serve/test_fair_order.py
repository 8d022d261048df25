"""A request with many answers or long prompts does not make others wait for all of them."""

from __future__ import annotations

import itertools

import pytest

from shoal.serve.backend import LocalBackend
from shoal.serve.batching.batching_engine import BatchingEngine
from tests.serve.test_batching import Heard, job, make_model
from tests.serve.test_nodes import finish


def engine(running: int) -> BatchingEngine:
    return BatchingEngine(LocalBackend(make_model("learned")), most_running=running, most_waiting=100, clock=itertools.count().__next__)


@pytest.mark.parametrize("running", [2, 4])
def test_a_request_of_many_answers_leaves_a_place_for_others(running: int) -> None:
    one, many, ended = engine(running), [Heard() for _ in range(20)], list[int]()
    one.submit(*(job([3, 4], listener, 30) for listener in many))
    one.step()
    assert len(one.running) == running - 1
    for number in range(3):  # each comes when the one before has ended
        later = Heard()
        one.submit(job([number], later, 5))
        while not later.end:
            one.step()
        ended.append(sum(bool(listener.end) for listener in many))
    assert ended[0] == 0, "it did not wait for any of the many"
    finish(one)
    assert [listener.end for listener in many] == ["length"] * 20
    assert len({tuple(listener.tokens) for listener in many}) == 1


def test_one_place_goes_to_requests_in_their_order() -> None:
    one, first, second = engine(1), [Heard(), Heard()], Heard()
    one.submit(*(job([3], listener, 4) for listener in first))
    one.submit(job([5], second, 4))
    finish(one)
    assert [listener.end for listener in (*first, second)] == ["length"] * 3


def test_a_short_prompt_is_read_before_long_ones_that_came_earlier() -> None:
    one, long, short = engine(8), [Heard() for _ in range(5)], Heard()
    one.backend.largest_chunk = 32
    one.submit(*(job([number] * 40, listener, 3) for number, listener in enumerate(long)))
    one.step()
    one.step()
    one.submit(job([7] * 6, short, 1))
    steps = 0
    while not short.end:
        one.step()
        steps += 1
    assert steps <= 5
    assert sum(bool(listener.tokens) for listener in long) <= 2
    finish(one)
    assert [len(listener.tokens) for listener in long] == [3] * 5


def test_many_short_prompts_do_not_keep_a_long_one_from_being_read() -> None:
    one, long = engine(4), Heard()
    one.backend.largest_chunk = 32
    one.submit(job([5] * 48, long, 1))
    for number in range(200):
        if long.end:
            break
        one.submit(job([number % 30] * 8, Heard(), 1))
        one.step()
    assert number < 40
