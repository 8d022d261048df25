"""Simulates a run with a pipeline over several machines: the stage of each machine, and the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.config import Run
from shoal.engines.pipeline.split import LayerSizes
from shoal.errors import ShoalError
from shoal.runs import stage_placement
from shoal.scheduling.layer_split import MachineSpec, split
from shoal.simulate.machines import SimulatedMachine
from shoal.simulate.meta_model import MetaModel, build_meta_model, data_of
from shoal.simulate.pipeline_timing import PipelineStep, PlacedStage, stages_on, time_step
from shoal.simulate.report import format_hours
from shoal.simulate.simulation import SimulationOptions, step_s_for, weather_for
from shoal.strategies import run_length


class PipelineReport(NamedTuple):
    """The simulated performance of a pipeline."""

    held: list[PlacedStage]
    step: PipelineStep
    samples: int
    """Per step."""
    steps: int
    """Of the whole run."""
    hours: float | None
    """Requested virtual hours; None: the whole run."""
    passes: int
    """Micro-batches per step."""

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step.seconds

    @property
    def run_hours(self) -> float:
        return self.steps * self.step.seconds / 3600

    def rows(self) -> list[tuple[str, str]]:
        """The rows of the printed table."""
        done = self.steps if self.hours is None else min(self.steps, int(3600 * self.hours / self.step.seconds))
        end = ": the run comes to its end" if done == self.steps else ""
        busy = ", ".join(f"{one.machine.name} {one.computes_s / self.step.seconds:.0%}" for one in self.held)
        stages = [
            ("stages" if not number else "", f"{one.stage} on {one.machine.name}: {1e3 * one.computes_s:,.1f} ms of a step")
            for number, one in enumerate(self.held)
        ]
        return [
            ("run", f"pipeline, {len(self.held)} stages, {self.passes} micro-batches a step"),
            *stages,
            ("step", f"{1e3 * self.step.seconds:,.1f} ms"),
            ("virtual time", f"{format_hours(done * self.step.seconds / 3600)}, {done:,} of {self.steps:,} steps{end}"),
            ("samples/s", f"{self.samples_per_s:,.1f}"),
            ("utilisation", f"{self.step.utilisation:.1%} of the time ({busy})"),
            ("bytes", f"{self.step.bytes / 1e6:,.2f} MB a step, {done * self.step.bytes / 1e6:,.1f} MB in all"),
        ]


def pipelined(run: Run, asked: SimulationOptions) -> PipelineReport:
    """Simulate a run whose strategy is local and whose engine is pipeline. Raises ShoalError for a stage that fits no machine."""
    if asked.learns or asked.false_share or asked.cores is not None:
        raise ShoalError("of a pipeline times and bytes are simulated: leave --learn, --false-workers and --cores out")
    found = build_meta_model(run, data_of(run, asked.samples))
    layers, vocabulary = found.layers, found.vocabulary
    step_s = asked.step_s or _batch_s(found, asked)
    stages = stage_placement.stages_of(run, layers, vocabulary) if run.placed else None
    machines = _machines(run, asked, len(stages) if stages else None, step_s)
    if stages is None:
        stages = stage_placement.stages_between(run, layers, vocabulary, _bounds(run, layers, machines))
    else:
        by_name = {machine.name: machine for machine in machines}
        found_places = stage_placement.place_stages(run, stages, {name: name for name in by_name})
        machines = [by_name[found_places[stage.id]] for stage in stages]
    held = stages_on(run, layers, stages, machines)
    samples = (run.training.batch_size or 1) * run.training.gradient_accumulation_steps
    steps = run_length.alone(run, found.parts.feed.batches_per_epoch, 1)
    return PipelineReport(held, time_step(run, layers, held), samples, steps, asked.hours, stage_placement.micro_batches_per_step(run))


def _batch_s(found: MetaModel, asked: SimulationOptions) -> float:
    """Seconds per batch, measured with the engine's micro-batches: many small ones take longer than one large batch."""
    training, engine = found.run.training, found.run.engine
    size = training.batch_size or 1
    smaller = max(1, size // getattr(engine, "micro_batches", 1))
    micro_batch = build_meta_model(found.run.replace(training=training.replace(batch_size=smaller)), found.parts.data)
    return size / smaller * step_s_for(micro_batch, asked)


def _machines(run: Run, asked: SimulationOptions, stages: int | None, step_s: float) -> list[SimulatedMachine]:
    """The machines that the settings list, the server first; else one for each stage, all alike."""
    names = list(stage_placement.listed_machines(run))
    count = asked.workers or len(names) or stages or (run.cluster.num_workers or 1) + 1
    named = run.replace(cluster=run.cluster.replace(workers=tuple(names)))
    return list(weather_for(named, asked, count, step_s, asked.hours or 1.0).machines)


def _bounds(run: Run, layers: LayerSizes, machines: Sequence[SimulatedMachine]) -> list[int]:
    """The engine's split of the layers for machines of these speeds."""
    counts = getattr(run.engine, "layers", ())
    if counts:
        return [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return split(layers.work, [MachineSpec(1 / (machine.step_s * machine.slowdown)) for machine in machines], after=layers.work_after)
