"""Tasks as pipeline stages of one model: the layers of each stage, and the machine that gets it.

A stage is the whole layers that come nearest to its task's share of the weights, in the order of the tasks. Every stage needs a machine of
its own: where the scheduler's matching leaves a stage without one, other stages are moved (augmenting paths).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shoal.config.schema.cluster import ScheduledTask
from shoal.errors import ShoalError
from shoal.scheduling.matching import Matching, PendingTask, WorkerSpec, fits, lacking

_ROUNDING = 0.02
"""Shares whose sum is within this of 1 count as the whole model, such as 0.33 three times."""


class StageShare(NamedTuple):
    """A task as a pipeline stage."""

    id: str
    share: float
    """Share of the model's weights; all shares sum to 1."""
    priority: float
    flops: float
    """Required compute, in the units of the machines' claims; 0: not given."""


def stage_shares(tasks: Sequence[ScheduledTask]) -> list[StageShare]:
    """The stages of the tasks. The rest of the model, if any, is cut into further stages no larger than the largest task."""
    whole = sum(task.model_share for task in tasks)
    rest, parts = 1.0 - whole, [StageShare(task.id, task.model_share, task.priority, task.required_flops) for task in tasks]
    if abs(rest) <= _ROUNDING:
        return [part._replace(share=part.share / whole) for part in parts]
    count = math.ceil(rest / max(part.share for part in parts) - 1e-9)
    least = min(part.priority for part in parts)
    return [*parts, *(StageShare(f"rest-{number + 1}", rest / count, least, 0.0) for number in range(count))]


def bounds_by_share(sizes: Sequence[float], shares: Sequence[float], before: float = 0.0, after: float = 0.0) -> list[int]:
    """The bounds of each stage's layers: every bound is where the cumulative size is nearest to the share; each stage has a layer.

    `before` and `after`: additional size of the first and the last stage. Raises ShoalError where there are more stages than layers.
    """
    layers, stages = len(sizes), len(shares)
    if stages > layers:
        raise ShoalError(f"{stages} stages need at least one layer each, and the model has {layers}")
    reached = [before + size for size in accumulate(sizes, initial=0.0)]
    whole, bounds, wanted = reached[-1] + after, [0], list(accumulate(shares))
    for stage in range(1, stages):
        able = range(bounds[-1] + 1, layers - (stages - stage) + 1)
        target = wanted[stage - 1] * whole
        bounds.append(min(able, key=lambda end: abs(reached[end] - target)))
    return [*bounds, layers]


def match_stages(jobs: Sequence[PendingTask], machines: Sequence[WorkerSpec], matching: Matching, must_have: str = "") -> dict[str, str]:
    """The machine of each stage, by name. Raises ShoalError that names a stage without a machine, and what it lacks.

    `must_have`: a machine that must get a stage; if the scheduler gives it none, it gets the smallest stage that fits.
    """
    for job in jobs:
        if lack := lacking(job, machines):
            raise ShoalError(f"no machine can have the stage `{job.id}`: it {lack}")
    found = _completed(jobs, machines, matching)
    if not must_have or must_have in found.values():
        return found
    here, others = next(one for one in machines if one.name == must_have), [one for one in machines if one.name != must_have]
    own = min((job for job in jobs if fits(job, here)), key=lambda job: job.memory_gb)
    return {own.id: here.name} | _completed([job for job in jobs if job.id != own.id], others, matching)


def _completed(jobs: Sequence[PendingTask], machines: Sequence[WorkerSpec], matching: Matching) -> dict[str, str]:
    """The scheduler's match, completed by augmenting paths where it leaves a stage without a machine."""
    chosen, by_id = matching(jobs, [machine._replace(capacity=1) for machine in machines]), {job.id: job for job in jobs}
    placed = {name: by_id[ids[0]] for name, ids in chosen.items()}
    for job in jobs:
        if job not in placed.values() and not _make_room(job, machines, placed, set()):
            raise ShoalError(_without_machine(job, jobs, machines))
    return {job.id: name for name, job in placed.items()}


def _make_room(job: PendingTask, machines: Sequence[WorkerSpec], placed: dict[str, PendingTask], asked: set[str]) -> bool:
    """Give a stage a machine; the stage that was there is moved to another machine (augmenting path). `placed`: by machine."""
    for machine in machines:
        if machine.name in asked or not fits(job, machine):
            continue
        asked.add(machine.name)
        if machine.name not in placed or _make_room(placed[machine.name], machines, placed, asked):
            placed[machine.name] = job
            return True
    return False


def _without_machine(job: PendingTask, jobs: Sequence[PendingTask], machines: Sequence[WorkerSpec]) -> str:
    if len(machines) < len(jobs):
        return f"{len(jobs)} stages need a machine each, and there are {len(machines)}: none is left for `{job.id}`"
    able = [machine.name for machine in machines if fits(job, machine)]
    has = f"{', '.join(able)}, which {'has' if len(able) == 1 else 'have'} so much, {'has' if len(able) == 1 else 'have'}"
    return f"no machine is left for the stage `{job.id}`: it needs {job.memory_gb:.3g} GB of memory, and {has} another stage that needs it"
