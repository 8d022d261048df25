"""The time of one pipeline step over several machines, simulated with the real engine's pass schedule.

A link carries one tensor at a time in each direction, in order. A step ends with the collectives of all stages and the exchange of the tied
matrix between the first and the last stage.
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
"""Share of the forward passes in a step: a backward pass has two matrix products for each one of a forward pass."""
_CHECKPOINTING = 4 / 3
"""Factor of gradient checkpointing on the time of a step."""
_COLLECTIVES = 4
"""Collectives of all stages per step: sample counts, leaving workers, the gradient's norm, the metrics."""


class PlacedStage(NamedTuple):
    """A stage on its machine."""

    stage: PipelineStage
    machine: SimulatedMachine
    computes_s: float
    """Seconds of computing per step."""


class PipelineStep(NamedTuple):
    seconds: float
    computing_s: list[float]
    """For each stage."""
    bytes: float
    """Transferred between all stages."""

    @property
    def utilisation(self) -> float:
        return sum(self.computing_s) / (len(self.computing_s) * self.seconds)


def stages_on(run: Run, layers: LayerSizes, stages: Sequence[PipelineStage], machines: Sequence[SimulatedMachine]) -> list[PlacedStage]:
    """The stages on these machines, in order. A machine's `step_s` is the time of a batch through the whole model."""
    whole, batches = sum(layers.work) + layers.work_after, run.training.gradient_accumulation_steps
    return [
        PlacedStage(stage, machine, batches * machine.step_s * machine.slowdown * stage.work / whole)
        for stage, machine in zip(stages, machines, strict=True)
    ]


def time_step(run: Run, layers: LayerSizes, held: Sequence[PlacedStage]) -> PipelineStep:
    """Time and traffic of a step, by discrete-event simulation."""
    batches, parts = run.training.gradient_accumulation_steps, micro_batches_per_step(run)
    streams, tied = batches * stream_bytes(run), 4 * layers.copied
    passes_s = _Passes(run, held, parts, streams / parts).run()
    hops = [_hop(one.machine, other.machine) for one, other in itertools.pairwise(held)]
    collectives_s = _COLLECTIVES * 2 * sum(latency for latency, _ in hops)
    transferred = 2.0 * streams * len(hops)
    if hops and tied:  # its gradient goes to the first stage, and the new matrix to the last
        latency, rate = _hop(held[0].machine, held[-1].machine)
        collectives_s, transferred = collectives_s + 2 * (latency + tied / rate), transferred + 2 * tied
    return PipelineStep(passes_s + collectives_s, [one.computes_s for one in held], transferred)


def _hop(one: SimulatedMachine, other: SimulatedMachine) -> tuple[float, float]:
    """Latency in seconds and rate in bytes per second between two machines, whose links meet in the core of the network."""
    rates = [machine.link.mbit_per_s * 1e6 / 8 for machine in (one, other) if machine.link.mbit_per_s]
    return (one.link.round_trip_ms + other.link.round_trip_ms) / 4e3, min(rates, default=float("inf"))


class _Passes:
    """All forward and backward passes of one step."""

    def __init__(self, run: Run, held: Sequence[PlacedStage], parts: int, stream: float) -> None:
        """`parts`: micro-batches; `stream`: bytes from one stage to the next per micro-batch."""
        count, schedule = len(held), getattr(run.engine, "schedule", "1f1b")
        self.schedules = [PassSchedule(stage, count, parts, schedule) for stage in range(count)]
        forward = _FORWARD / _CHECKPOINTING if run.training.gradient_checkpointing else _FORWARD
        self.forward_s = [one.computes_s * forward / parts for one in held]
        self.backward_s = [one.computes_s * (1 - forward) / parts for one in held]
        self.hops = [_hop(one.machine, other.machine) for one, other in itertools.pairwise(held)]
        self.stream, self.free_at = stream, {(stage, forward): 0.0 for stage in range(count) for forward in (True, False)}
        """When the link from a stage, forward or backward, can take the next tensor."""
        self.busy = [False] * count
        self.events: list[tuple[float, int, int, str]] = []
        self.numbers = itertools.count()

    def run(self) -> float:
        """Seconds until the last pass is done."""
        now = 0.0
        for stage in range(len(self.schedules)):
            self._start_next(stage, now)
        while self.events:
            now, _, stage, what = heapq.heappop(self.events)
            if what == "input":
                self.schedules[stage].inputs += 1
            elif what == "gradient":
                self.schedules[stage].gradients += 1
            else:
                self.busy[stage] = False
                self._send(stage, what == "forward", now)
            self._start_next(stage, now)
        assert all(schedule.done for schedule in self.schedules)
        return now

    def _start_next(self, stage: int, now: float) -> None:
        if self.busy[stage] or (next_pass := self.schedules[stage].next()) is None:
            return
        self.busy[stage] = True
        takes = self.forward_s[stage] if next_pass.forward else self.backward_s[stage]
        self._at(now + takes, stage, "forward" if next_pass.forward else "backward")

    def _send(self, stage: int, forward: bool, now: float) -> None:
        """Send activations forward, or their gradient backward, as soon as the link is free."""
        schedule = self.schedules[stage]
        if schedule.last if forward else schedule.first:
            return
        latency, rate = self.hops[stage if forward else stage - 1]
        sent = max(now, self.free_at[stage, forward]) + self.stream / rate
        self.free_at[stage, forward] = sent
        self._at(sent + latency, stage + 1 if forward else stage - 1, "input" if forward else "gradient")

    def _at(self, moment: float, stage: int, what: str) -> None:
        heapq.heappush(self.events, (moment, next(self.numbers), stage, what))
