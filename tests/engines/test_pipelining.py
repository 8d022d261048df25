"""The order of passes in a pipeline, on a virtual clock."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest

from shoal.engines.pipeline.schedule import PassSchedule


class Pipeline:
    """Stages that take some time for a pass, with links that take some time for a message."""

    def __init__(self, stages: int, micro_batches: int, schedule: str, durations: Any, latency: Any) -> None:
        self.turns = [PassSchedule(stage, stages, micro_batches, schedule) for stage in range(stages)]
        self.durations, self.latency = durations, latency
        self.passes: list[list[tuple[bool, int]]] = [[] for _ in range(stages)]
        self.most_under_way = [0] * stages
        self.busy = [False] * stages
        self.events: list[tuple[float, int, str, int]] = []
        self.now, self.count = 0.0, 0

    def run(self) -> float:
        """The time at which all stages are done."""
        for stage in range(len(self.turns)):
            self._begin(stage)
        while self.events:
            self.now, _, what, stage = heapq.heappop(self.events)
            turns = self.turns[stage]
            if what == "input":
                turns.inputs += 1
            elif what == "gradient":
                turns.gradients += 1
            else:
                self.busy[stage] = False
                self._pass_on(stage)
            self._begin(stage)
        assert all(turns.done for turns in self.turns), "nobody waits for ever"
        return self.now

    def _begin(self, stage: int) -> None:
        if self.busy[stage] or (turn := self.turns[stage].next()) is None:
            return
        self.busy[stage] = True
        self.passes[stage].append(turn)
        turns = self.turns[stage]
        self.most_under_way[stage] = max(self.most_under_way[stage], turns.forward - turns.backward)
        self._later(self.durations(stage, turn.forward), "done", stage)

    def _pass_on(self, stage: int) -> None:
        forward, _ = self.passes[stage][-1]
        if forward and not self.turns[stage].last:
            self._later(self.latency(), "input", stage + 1)
        if not forward and not self.turns[stage].first:
            self._later(self.latency(), "gradient", stage - 1)

    def _later(self, after: float, what: str, stage: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + after, self.count, what, stage))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_pipeline_ends_takes_micro_batches_in_order_and_keeps_few_under_way(schedule: str) -> None:
    chance = random.Random(7)
    for stages in range(1, 7):
        for micro_batches in range(1, 10):
            made = Pipeline(stages, micro_batches, schedule, lambda stage, forward: chance.random() ** 3, lambda: chance.random())
            made.run()
            for stage, passes in enumerate(made.passes):
                assert [number for forward, number in passes if forward] == list(range(micro_batches))
                assert [number for forward, number in passes if not forward] == list(range(micro_batches))
                most = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
                assert made.most_under_way[stage] <= most


def test_equal_stages_wait_only_while_the_pipeline_fills_and_drains() -> None:
    for schedule in ("1f1b", "gpipe"):
        made = Pipeline(4, 16, schedule, lambda stage, forward: 1.0 if forward else 2.0, lambda: 0.0)
        assert made.run() == 3 * (16 + 4 - 1)


def test_1f1b_alternates_once_the_pipeline_is_full() -> None:
    made = Pipeline(3, 6, "1f1b", lambda stage, forward: 1.0, lambda: 0.0)
    made.run()
    assert "".join("F" if forward else "B" for forward, _ in made.passes[2]) == "FB" * 6
    assert "".join("F" if forward else "B" for forward, _ in made.passes[0]) == "FFFBFBFBFBBB"


def test_gpipe_begins_its_backward_passes_when_all_forward_passes_are_done() -> None:
    made = Pipeline(3, 4, "gpipe", lambda stage, forward: 1.0, lambda: 0.5)
    made.run()
    for passes in made.passes:
        assert [forward for forward, _ in passes] == [True] * 4 + [False] * 4
