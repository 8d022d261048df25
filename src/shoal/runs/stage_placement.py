"""The stages of a pipeline over machines: what each stage needs, and which machine runs it.

The settings describe the machines. A machine without a description is assumed to fit every stage; its process checks the free memory when
it starts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from shoal import data, models
from shoal.config import Run
from shoal.config.schema.cluster import Host
from shoal.engines.pipeline.split import LayerSizes, layers_of
from shoal.runs.live_objects import NO_LIVE_OBJECTS, players_for
from shoal.scheduling import KINDS, PendingTask, WorkerSpec
from shoal.scheduling import memory_estimate as memory
from shoal.scheduling.task_stages import bounds_by_share, match_stages, stage_shares

_PASSES = 6
"""Floating-point operations per multiplication of the forward pass: two forward, four backward."""
_USUAL = 1e11
"""Assumed FLOP/s of a median machine; it weighs computing against sending where tasks give no FLOPs."""
_SHAPED = ("gpt", "moe", "huggingface")
"""Models that can be built on the meta device; a program builds the others with their weights."""


class PipelineStage(NamedTuple):
    """Consecutive layers of a model, and what training them takes."""

    id: str
    first: int
    last: int
    """The layer after its last one."""
    share: float
    """Share of the model's weights."""
    work: float
    """Multiplications for one token."""
    memory: memory.MemoryEstimate
    priority: float = 1.0
    flops: float = 0.0

    def __str__(self) -> str:
        layers = f"layer {self.first + 1}" if self.last == self.first + 1 else f"layers {self.first + 1} to {self.last}"
        needs = f"{self.memory.gb:.3g} GB" if self.memory.gb >= 1 else f"{1e3 * self.memory.gb:.3g} MB"
        return f"`{self.id}` ({layers}, {self.share:.0%} of the weights, {needs})"


def layers_and_vocabulary(run: Run) -> tuple[LayerSizes, int]:
    """The layers of a run's model, and the size of its vocabulary. Raises ShoalError where it cannot be split."""
    info = data.load(run).info
    players = models.build(run, info.shapes, "meta") if run.model.kind in _SHAPED else players_for(run, NO_LIVE_OBJECTS, info)
    return layers_of(players["model"]), info.vocab_size or 0


def stages_of(run: Run, layers: LayerSizes, vocabulary: int) -> list[PipelineStage]:
    """The stages that the tasks of the settings describe, rounded to whole layers."""
    parts = stage_shares(run.scheduler.tasks)
    bounds = bounds_by_share(layers.sizes, [part.share for part in parts], layers.before, layers.after)
    stages = stages_between(run, layers, vocabulary, bounds)
    return [stage._replace(id=part.id, priority=part.priority, flops=part.flops) for stage, part in zip(stages, parts, strict=True)]


def stages_between(run: Run, layers: LayerSizes, vocabulary: int, bounds: Sequence[int]) -> list[PipelineStage]:
    """Stages between these layer bounds, named by their numbers."""
    return [stage_of_layers(run, layers, vocabulary, (number, len(bounds) - 1), cut) for number, cut in enumerate(pairwise(bounds))]


def stage_of_layers(run: Run, layers: LayerSizes, vocabulary: int, place: tuple[int, int], cut: tuple[int, int]) -> PipelineStage:
    """One stage. `place`: its number, and the number of stages; `cut`: its first layer, and the one after its last."""
    (number, stages), (first, last) = place, cut
    passes, ends = micro_batches_per_step(run), last == len(layers.sizes)
    under_way = passes if getattr(run.engine, "schedule", "") == "gpipe" else min(passes, stages - number)
    size, copied = layers.size_of(first, last), layers.copied if ends and first else 0
    needs = memory.stage_memory(run, size, copied, last - first, vocabulary if ends else 0, under_way)
    return PipelineStage(f"stage-{number + 1}", first, last, size / layers.size, layers.work_of(first, last), needs)


def micro_batches_per_step(run: Run) -> int:
    parts = min(run.training.batch_size or 1, getattr(run.engine, "micro_batches", 1))
    return parts * run.training.gradient_accumulation_steps


def tokens_per_batch(run: Run) -> int:
    return (run.training.batch_size or 1) * (run.data.sequence_length or getattr(run.model, "max_seq_len", None) or 1)


def stream_bytes(run: Run) -> int:
    """Bytes from one stage to the next for a batch; the gradients that come back are as large."""
    return 4 * tokens_per_batch(run) * (getattr(run.model, "hidden_size", None) or 0)


# --- machines -------------------------------------------------------------------------------------


def listed_machines(run: Run) -> dict[str, str]:
    return {name: name for name in (run.cluster.server, *run.cluster.workers) if name}


def place_stages(run: Run, stages: Sequence[PipelineStage], names: Mapping[str, str], must_have: str = "") -> dict[str, str]:
    """By stage name: the machine that the run's scheduler chooses. Raises ShoalError where no machine fits a stage.

    `names`: the machines, each with the name under which the settings describe it; `must_have`: a machine that must get a stage.
    """
    hosts = {shown: run.cluster.hosts.get(name, Host()) for shown, name in names.items()}
    claims = [host.flops for host in hosts.values() if host.flops]
    usual = statistics.median(claims) if claims else 1.0
    machines = [WorkerSpec(name, (host.flops or usual) / usual, host.memory_gb, host.bandwidth_mbps) for name, host in hosts.items()]
    return match_stages(_jobs(run, stages, usual), machines, KINDS[run.scheduler.kind], must_have)


def _jobs(run: Run, stages: Sequence[PipelineStage], usual: float) -> list[PendingTask]:
    """The stages as jobs of a scheduler. Work is the time of a step in seconds on a median machine."""
    tokens, megabits, found = tokens_per_batch(run), 8e-6 * stream_bytes(run), []
    for number, stage in enumerate(stages):
        work = stage.flops / usual if stage.flops else _PASSES * stage.work * tokens / _USUAL
        neighbours = (number > 0) + (number < len(stages) - 1)
        found.append(PendingTask(stage.id, work, stage.memory.gb, stage.priority, 2 * neighbours * megabits))
    return found


def format_stages(stages: Sequence[PipelineStage], machines: dict[str, str]) -> str:
    """The stages and their machines, for the user."""
    return "; ".join(f"{stage}{f' on {machines[stage.id]}' if stage.id in machines else ''}" for stage in stages)


def format_rest(run: Run, stages: Sequence[PipelineStage]) -> str:
    """A note on the stages that no task describes; empty where there are none."""
    further = [stage.id for stage in stages[len(run.scheduler.tasks) :]]
    if not further:
        return ""
    whole, to = sum(task.model_share for task in run.scheduler.tasks), f" to {further[-1]}" if len(further) > 1 else ""
    return f"the tasks listed have {whole:.0%} of the model; what they leave is cut into {further[0]}{to}"
