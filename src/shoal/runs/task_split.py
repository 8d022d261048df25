"""Divides the data of a run into tasks for a scheduler: the tasks that the settings list, and further ones for the rest."""

from __future__ import annotations

from typing import NamedTuple

from shoal.config import Run
from shoal.config.schema.cluster import Host, ScheduledTask
from shoal.coordinator.run_plan import DataTask, TaskPlan
from shoal.errors import ShoalError
from shoal.scheduling import KINDS, memory_estimate

_PER_WORKER = 4
"""Tasks per worker where the settings list none: a fast worker can do several while a slow one does one."""
_CONTRIBUTIONS = 8
"""The least number of contributions in such a task, if every worker still gets one: starting a task takes time."""


class SplitInput(NamedTuple):
    """The data and the model that are divided."""

    batches: int
    """Batches of an epoch."""
    grain: int
    """Batches of a contribution; tasks begin and end at multiples of it."""
    workers: int
    parameters: int
    vocabulary: int
    megabits: float
    """Megabits sent for a contribution, both ways."""
    frozen_bytes: int = 0
    """Memory of the weights that are not trained."""


class TaskSplit(NamedTuple):
    tasks: TaskPlan
    note: str
    """For the user."""


def split_into_tasks(run: Run, extent: SplitInput) -> TaskSplit:
    """Divide the data. Raises ShoalError where there is too little of it."""
    listed, note = run.scheduler.tasks, ""
    if listed:
        wanted, note = _with_rest(listed, extent)
    else:
        contributions = extent.batches // extent.grain
        count = min(contributions, max(extent.workers, min(_PER_WORKER * extent.workers, contributions // _CONTRIBUTIONS)))
        wanted = [ScheduledTask(id=f"task-{number + 1}", data_share=1 / count) for number in range(count)]
    needs_gb = memory_estimate.training_memory(run, extent.parameters, extent.vocabulary, extent.frozen_bytes).gb
    tasks = TaskPlan(
        _placed(wanted, extent, needs_gb),
        run.training.epochs,
        extent.grain,
        KINDS[run.scheduler.kind],
        run.cluster.hosts,
        extent.megabits,
        run.scheduler.interval_s,
        extent.workers,
    )
    return TaskSplit(tasks, note)


def relayed_tasks(run: Run, grain: int) -> TaskPlan:
    """The plan of a relay, whose batches are those of the task that it has from the coordinator above."""
    return TaskPlan((DataTask("the relay's task", 0, 0),), None, grain, KINDS[run.scheduler.kind], run.cluster.hosts)


def listed_workers(run: Run) -> dict[str, str]:
    """By name: the addresses of the workers that the settings list; empty where none is given."""
    hosts = {name: run.cluster.hosts.get(name, Host()) for name in run.cluster.workers}
    return {name: f"{host.host}{f':{host.port}' if host.port else ''}" if host.host else "" for name, host in hosts.items()}


def _with_rest(listed: tuple[ScheduledTask, ...], extent: SplitInput) -> tuple[list[ScheduledTask], str]:
    """The tasks with a share each, and further ones of similar size for the rest of the data; and a note for the user."""
    given = [task.data_share for task in listed if task.data_share is not None]
    rest, open_ones = 1.0 - sum(given), len(listed) - len(given)
    if open_ones:
        return [task if task.data_share is not None else task.replace(data_share=rest / open_ones) for task in listed], ""
    if rest * extent.batches < extent.grain:
        return list(listed), ""
    count = max(1, min(round(rest * len(given) / sum(given)), int(rest * extent.batches) // extent.grain))
    needs, least = max(task.model_share for task in listed), min(task.priority for task in listed)
    names = [f"rest-{number + 1}" for number in range(count)]
    further = [ScheduledTask(id=name, model_share=needs, data_share=rest / count, priority=least) for name in names]
    to = f" to {names[-1]}" if count > 1 else ""
    return [*listed, *further], f"the tasks listed have {1 - rest:.0%} of the data; what they leave is cut into {names[0]}{to}"


def _placed(wanted: list[ScheduledTask], extent: SplitInput, needs_gb: float) -> tuple[DataTask, ...]:
    """The tasks as consecutive ranges of an epoch. They are whole contributions, so shares are approximate."""
    whole, at, found = extent.batches // extent.grain, 0.0, list[DataTask]()
    if whole < len(wanted):
        raise ShoalError(
            f"{len(wanted)} tasks are to share {whole} contribution{'s' * (whole != 1)} of an epoch: list fewer tasks, or take more data"
        )
    density = _density(wanted, extent)
    for number, task in enumerate(wanted):
        first = found[-1].end if found else 0
        at += task.data_share or 0.0
        last = whole - (len(wanted) - number - 1)  # one contribution at least for each that follows
        end = extent.grain * min(last, max(first // extent.grain + 1, round(at * whole)))
        work = task.required_flops / (end - first) if task.required_flops else density
        found.append(DataTask(task.id, first, end, work, task.model_share * needs_gb, task.priority))
    return tuple(found)


def _density(wanted: list[ScheduledTask], extent: SplitInput) -> float:
    """Work per batch of tasks without `required_flops`: the mean of those with it; 1 where none has it."""
    telling = [task for task in wanted if task.required_flops]
    data = sum(task.data_share or 0.0 for task in telling) * extent.batches
    return sum(task.required_flops for task in telling) / data if telling else 1.0
