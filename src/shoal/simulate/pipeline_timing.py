"""One model over several machines in virtual time: what a step of a pipeline takes, by the real rules of who computes what when.

Links carry one tensor at a time each way, in order. A step ends with what all stages agree on, and with the matrix that the first and the
last one share.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from shoal.config import Run
from shoal.engines.pipeline.schedule import PassSchedule
from shoal.engines.pipeline.split import LayerSizes
from shoal.runs.stage_placement import PipelineStage, micro_batches_per_step, stream_bytes
from shoal.simulate.machines import SimulatedMachine

_FORWARD = 1 / 3
"""The part of a step that forward passes take: a backward pass has two products for each of a forward pass."""
_AGAIN = 4 / 3
"""How many times as long a step takes whose activations are computed again."""
_AGREEMENTS = 4
"""How often all stages wait for each other in a step: what counts, who leaves, the gradient's norm, the figures."""


class PlacedStage(NamedTuple):
    """A stage on its machine."""

    stage: PipelineStage
    machine: SimulatedMachine
    computes_s: float
    """What a step takes it to compute."""


class PipelineStep(NamedTuple):
    """One step of a pipeline."""

    seconds: float
    computing_s: list[float]
    """Of each stage."""
    bytes: float
    """What travels between all stages."""

    @property
    def utilisation(self) -> float:
        return sum(self.computing_s) / (len(self.computing_s) * self.seconds)


def stages_on(run: Run, layers: LayerSizes, stages: Sequence[PipelineStage], machines: Sequence[SimulatedMachine]) -> list[PlacedStage]:
    """The stages on machines whose `step_s` is what a batch of the whole model takes them, in the order of the stages."""
    whole, batches = sum(layers.work) + layers.work_after, run.training.gradient_accumulation_steps
    return [
        PlacedStage(stage, machine, batches * machine.step_s * machine.slowdown * stage.work / whole)
        for stage, machine in zip(stages, machines, strict=True)
    ]


def time_step(run: Run, layers: LayerSizes, held: Sequence[PlacedStage]) -> PipelineStep:
    """What a step takes, computed event by event."""
    batches, parts = run.training.gradient_accumulation_steps, micro_batches_per_step(run)
    streams, tied = batches * stream_bytes(run), 4 * layers.copied
    passes_s = _Passes(run, held, parts, streams / parts).run()
    hops = [_hop(one.machine, other.machine) for one, other in itertools.pairwise(held)]
    agreeing_s = _AGREEMENTS * 2 * sum(latency for latency, _ in hops)
    travels = 2.0 * streams * len(hops)
    if hops and tied:  # its gradient comes to the first stage, and the new one goes to the last
        latency, rate = _hop(held[0].machine, held[-1].machine)
        agreeing_s, travels = agreeing_s + 2 * (latency + tied / rate), travels + 2 * tied
    return PipelineStep(passes_s + agreeing_s, [one.computes_s for one in held], travels)


def _hop(one: SimulatedMachine, other: SimulatedMachine) -> tuple[float, float]:
    """From one machine to another: seconds that a message is under way, and bytes a second. Each is as far from the middle of the network
    as its own link says."""
    rates = [machine.link.mbit_per_s * 1e6 / 8 for machine in (one, other) if machine.link.mbit_per_s]
    return (one.link.round_trip_ms + other.link.round_trip_ms) / 4e3, min(rates, default=float("inf"))


class _Passes:
    """All forward and backward passes of one step."""

    def __init__(self, run: Run, held: Sequence[PlacedStage], parts: int, stream: float) -> None:
        """`parts`: micro-batches; `stream`: bytes that go on from one stage to the next for each."""
        count, schedule = len(held), getattr(run.engine, "schedule", "1f1b")
        self.turns = [PassSchedule(stage, count, parts, schedule) for stage in range(count)]
        forward = _FORWARD / _AGAIN if run.training.gradient_checkpointing else _FORWARD
        self.forward_s = [one.computes_s * forward / parts for one in held]
        self.backward_s = [one.computes_s * (1 - forward) / parts for one in held]
        self.hops = [_hop(one.machine, other.machine) for one, other in itertools.pairwise(held)]
        self.stream, self.free_at = stream, {(stage, on): 0.0 for stage in range(count) for on in (True, False)}
        """When the link from a stage, on or back, can take the next tensor."""
        self.busy = [False] * count
        self.events: list[tuple[float, int, int, str]] = []
        self.numbers = itertools.count()

    def run(self) -> float:
        """Seconds until the last pass is done."""
        now = 0.0
        for stage in range(len(self.turns)):
            self._go_on(stage, now)
        while self.events:
            now, _, stage, what = heapq.heappop(self.events)
            if what == "input":
                self.turns[stage].inputs += 1
            elif what == "gradient":
                self.turns[stage].gradients += 1
            else:
                self.busy[stage] = False
                self._send(stage, what == "forward", now)
            self._go_on(stage, now)
        assert all(turns.done for turns in self.turns)
        return now

    def _go_on(self, stage: int, now: float) -> None:
        if self.busy[stage] or (turn := self.turns[stage].next()) is None:
            return
        self.busy[stage] = True
        takes = self.forward_s[stage] if turn.forward else self.backward_s[stage]
        self._at(now + takes, stage, "forward" if turn.forward else "backward")

    def _send(self, stage: int, forward: bool, now: float) -> None:
        """A stream goes on, or its gradient back, as soon as the link is free."""
        turns = self.turns[stage]
        if turns.last if forward else turns.first:
            return
        latency, rate = self.hops[stage if forward else stage - 1]
        sent = max(now, self.free_at[stage, forward]) + self.stream / rate
        self.free_at[stage, forward] = sent
        self._at(sent + latency, stage + 1 if forward else stage - 1, "input" if forward else "gradient")

    def _at(self, moment: float, stage: int, what: str) -> None:
        heapq.heappush(self.events, (moment, next(self.numbers), stage, what))
