"""Plans for a pipeline over several machines: which machines, the layers of each, and the time of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from shoal.config import Run
from shoal.config.load import LoadedConfig
from shoal.config.machines import MachineKind
from shoal.config.ranks import STRATEGY_ALONE
from shoal.config.rules.rule import CUT_INTO_STAGES
from shoal.config.schema.engine import Pipeline, Schedule
from shoal.engines.pipeline.split import LayerSizes
from shoal.errors import ShoalError
from shoal.runs.build_run import feed_for_seat
from shoal.runs.stage_placement import PipelineStage, stage_of_layers, stages_between
from shoal.scheduling.layer_split import MachineSpec, split
from shoal.simulate.machines import SimulatedMachine
from shoal.simulate.meta_model import MetaModel, link_of, one_by_one
from shoal.simulate.pipeline_timing import PipelineStep, stages_on, time_step
from shoal.strategies import run_length

_ENGINES = tuple(Pipeline(micro_batches=parts, schedule=schedule) for parts in (4, 8, 16, 32) for schedule in get_args(Schedule))
"""Micro-batches and schedules that are tried. The schedule with all forward passes first needs more memory and hides slow links better."""
_MAX_STAGES = 16
"""Largest number of stages that is tried."""


class PipelineCandidate(NamedTuple):
    """A pipeline with one stage per machine, as settings. The first machine keeps the run's folder."""

    machines: tuple[str, ...]
    shares: tuple[float, ...]
    hosts: tuple[tuple[str, Mapping[str, float]], ...]
    """By machine: its entry of `cluster.hosts`."""
    engine: Pipeline
    batch: int
    codec: str = "none"

    def settings(self) -> dict[str, Any]:
        """Changed settings. The priority scheduler takes tasks by priority and machines in order, so it keeps this placement."""
        count = len(self.machines)
        tasks = [
            {"id": f"stage-{number + 1}", "model_share": share, "priority": count - number} for number, share in enumerate(self.shares)
        ]
        cluster = {"server": self.machines[0], "workers": list(self.machines[1:]), "num_workers": count - 1, "hosts": dict(self.hosts)}
        return {
            "strategy.kind": STRATEGY_ALONE,
            "engine.kind": "pipeline",
            "engine.micro_batches": self.engine.micro_batches,
            "engine.schedule": self.engine.schedule,
            "scheduler.kind": "priority",
            "scheduler.tasks": tasks,
            "training.batch_size": self.batch,
        } | {f"cluster.{name}": value for name, value in cluster.items()}

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in zip(self.machines, self.shares, strict=True))
        return f"local, pipeline ({shares}) micro_batches={self.engine.micro_batches} {self.engine.schedule}"


class PipelinePlan(NamedTuple):
    """The simulated performance of a candidate."""

    candidate: PipelineCandidate
    loaded: LoadedConfig
    stages: list[PipelineStage]
    step: PipelineStep
    samples_per_s: float
    samples: int
    """In the whole run."""
    price_per_hour: float

    @property
    def memory_gb(self) -> float:
        return max(stage.memory.gb for stage in self.stages)


Variant = Callable[[Mapping[str, Any]], LoadedConfig]
"""Loads the run with some settings changed."""
Chosen = Sequence[tuple[str, MachineKind]]


def pipeline_plans(found: MetaModel, kinds: Mapping[str, MachineKind], variant: Variant) -> list[PipelinePlan]:
    """The fastest plan for each number of machines that can hold the model. Empty for a model that cannot be split into stages, and for
    machines with several devices. Raises ShoalError with the reason where the machines have too little memory, or all plans are refused."""
    if found.run.model.kind not in CUT_INTO_STAGES or any(kind.devices > 1 for kind in kinds.values()):
        return []
    layers = found.layers
    best, reason, plans = dict[int, _Tried](), "", list[PipelinePlan]()
    for chosen, engine in itertools.product(_orders(kinds, len(layers.sizes)), _ENGINES):
        try:
            tried = _try(found, layers, chosen, engine)
        except ShoalError as error:
            reason = reason or str(error)
            continue
        if len(chosen) not in best or tried.step.seconds < best[len(chosen)].step.seconds:
            best[len(chosen)] = tried
    for tried in best.values():
        try:
            plans.append(_plan(found, tried, variant))
        except ShoalError as error:
            reason = str(error)
    if reason and not plans:
        raise ShoalError(reason)
    return plans


def _orders(kinds: Mapping[str, MachineKind], layers: int) -> Iterator[Chosen]:
    """The fastest machines, or those with the most memory; most memory first, as the first stages have most micro-batches in flight."""
    every = one_by_one(kinds)
    for count in range(2, min(len(every), layers, _MAX_STAGES) + 1):
        orders = [tuple(sorted(sorted(every, key=key)[:count], key=_by_memory)) for key in (_by_speed, _by_memory)]
        yield from {tuple(name for name, _ in order): order for order in orders}.values()


def _by_memory(machine: tuple[str, MachineKind]) -> float:
    return -(machine[1].memory_gb or math.inf)


def _by_speed(machine: tuple[str, MachineKind]) -> float:
    return -(machine[1].steps_per_s or machine[1].flops or 0.0)


class _Tried(NamedTuple):
    chosen: Chosen
    engine: Pipeline
    stages: list[PipelineStage]
    step: PipelineStep


def _try(found: MetaModel, layers: LayerSizes, chosen: Chosen, engine: Pipeline) -> _Tried:
    """Time a step on machines in this order. Raises ShoalError where they cannot hold the model."""
    run = found.run.replace(engine=engine)
    stages = stages_between(run, layers, found.vocabulary, _bounds(found, run, layers, chosen))
    machines = [SimulatedMachine(name, found.step_s(run, kind), link_of(kind)) for name, kind in chosen]
    return _Tried(chosen, engine, stages, time_step(run, layers, stages_on(run, layers, stages, machines)))


def _plan(found: MetaModel, tried: _Tried, variant: Variant) -> PipelinePlan:
    """The plan with its settings. Raises ShoalError where the settings are refused."""
    shares = tuple(round(stage.share, 4) for stage in tried.stages)
    hosts = tuple((name, _host_entry(found, kind)) for name, kind in tried.chosen)
    names = tuple(name for name, _ in tried.chosen)
    candidate = PipelineCandidate(names, shares, hosts, tried.engine, found.run.training.batch_size or 1)
    loaded = variant(candidate.settings())
    run = loaded.run  # raises ConfigError for settings that contradict each other
    each = (run.training.batch_size or 1) * run.training.gradient_accumulation_steps
    steps = run_length.alone(run, feed_for_seat(run, found.parts.data).batches_per_epoch, 1)
    price = sum(kind.price_per_hour for _, kind in tried.chosen)
    return PipelinePlan(candidate, loaded, tried.stages, tried.step, each / tried.step.seconds, steps * each, price)


def _host_entry(found: MetaModel, kind: MachineKind) -> dict[str, float]:
    """A machine's entry of `cluster.hosts`."""
    speed = {"flops": float(f"{found.operations(found.run) / found.step_s(found.run, kind):.3g}"), "bandwidth_mbps": kind.bandwidth_mbps}
    return speed if kind.memory_gb is None else {"memory_gb": kind.memory_gb} | speed


def _bounds(found: MetaModel, run: Run, layers: LayerSizes, chosen: Chosen) -> list[int]:
    """The split of the layers that minimizes the time of the slowest machine, within each machine's memory."""

    def holds(number: int, first: int, last: int) -> bool:
        memory_gb, place = chosen[number][1].memory_gb, (number, len(chosen))
        return memory_gb is None or stage_of_layers(run, layers, found.vocabulary, place, (first, last)).memory.gb <= memory_gb

    whole = sum(layers.work) + layers.work_after
    machines = [MachineSpec(whole / found.step_s(run, kind)) for _, kind in chosen]
    return split(layers.work, machines, after=layers.work_after, holds=holds)


def machines_needed(found: MetaModel, run: Run, memory_gb: float) -> tuple[int, int] | None:
    """The least number of machines of this memory that train the model, and the micro-batches; None: a layer does not fit into one."""
    if run.model.kind not in CUT_INTO_STAGES:
        return None
    parts = min(_ENGINES[-1].micro_batches, run.training.batch_size or 1)
    staged, kind = run.replace(engine=Pipeline(micro_batches=parts)), MachineKind(memory_gb=memory_gb, steps_per_s=1.0)
    layers = found.layers
    for count in range(2, len(layers.sizes) + 1):
        try:
            _bounds(found, staged, layers, [("", kind)] * count)
        except ShoalError:
            continue
        return count, parts
    return None
