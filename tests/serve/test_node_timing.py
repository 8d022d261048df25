"""Deadlines of machines that hold layers."""

from __future__ import annotations

import pytest

from shoal.serve.nodes import node_timing
from shoal.serve.nodes.layer_host import LayerRange, TokenBatch
from shoal.serve.nodes.node_timing import NodeTiming, work_of

GRACE_S = 10.0


@pytest.fixture(autouse=True)
def usual_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_timing, "GRACE_S", GRACE_S)
    monkeypatch.setattr(node_timing, "SLOW_S", 1.0)


def batch(tokens: int, position: int = 0, requests: int = 1) -> TokenBatch:
    return TokenBatch(range(requests), [position] * requests, [[0] * tokens] * requests)


def test_the_deadline_grows_with_the_prompt_the_batch_and_the_tokens_before() -> None:
    assert work_of(batch(100), 1.0) > 99 * work_of(batch(1), 1.0)
    assert work_of(batch(1, requests=8), 1.0) == 8 * work_of(batch(1), 1.0)
    assert work_of(batch(1, position=10_000), 1.0) > 10 * work_of(batch(1), 1.0)
    timing = NodeTiming(0.001)
    timing.sent(1, 1000.0)
    assert timing.allowed_s() > GRACE_S + 19


def test_a_machine_is_late_by_measured_times_and_not_by_those_that_it_claims() -> None:
    timing = NodeTiming(1e5)
    for number in range(10):
        timing.sent(number, 10.0)
        assert timing.reported(number, float(number), number + 0.5) == 0.5
    timing.sent(10, 10.0)
    assert not timing.is_late(20.0, 20.0 + GRACE_S + 9.9)
    assert timing.is_late(20.0, 20.0 + GRACE_S + 10.1)


def test_reports_that_are_made_up_do_not_move_the_deadline() -> None:
    timing = NodeTiming(0.001)
    timing.sent(7, 1.0)
    for number in (3, 8, -1):
        timing.reported(number, 0.0, 30.0)
    assert timing.is_late(0.0, 31.0)
    timing.reported(7, 0.0, 31.0)
    assert not timing.is_late(0.0, 32.0), "work that was sent later waits for earlier work"


def test_caches_that_are_restored_and_layers_that_are_loaded_give_more_time() -> None:
    timing = NodeTiming(0.01)
    timing.sent(-1, 10_000.0)
    timing.sent(1, 1.0)
    assert not timing.is_late(0.0, 1000.0)
    timing.reported(1, 0.0, 1000.0)
    timing.loads(LayerRange(0, 2), 10_000_000, 1000.0)
    assert not timing.is_late_to_load(1000.0 + GRACE_S + 69)
    assert timing.is_late_to_load(1000.0 + GRACE_S + 71)
    timing.loaded(LayerRange(0, 2), 1071.0)
    assert not timing.is_late_to_load(1e6)


def test_a_machine_is_slow_if_many_batches_take_much_longer_than_it_claims() -> None:
    slow, busy = NodeTiming(0.001), NodeTiming(0.001)
    for number in range(8):
        for timing, seconds in ((slow, 2.0), (busy, 2.0 if number < 4 else 0.01)):
            timing.sent(number, 1.0)
            timing.reported(number, 10.0 * number, 10.0 * number + seconds)
    assert slow.is_slow()
    assert not busy.is_slow()
