"""Three algorithms that match tasks with workers: `priority`, `capability` and `gale-shapley`.

A job is what is left of a task, a machine is a worker with free capacity. Holds: each job is matched at most once and only to a machine
that it fits, and the match depends on the arguments alone.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_COMPUTE, _BANDWIDTH, _HEADROOM = 0.6, 0.25, 0.15
"""Weights of compute, bandwidth and free memory in a machine's score. Compute decides how long a task takes, so it counts most."""


class PendingTask(NamedTuple):
    """A task that needs a worker."""

    id: str
    work: float
    """Remaining work, in the units of the machines' speeds."""
    memory_gb: float = 0.0
    priority: float = 1.0
    """Larger is more urgent."""
    megabits: float = 0.0
    """Traffic between worker and coordinator during the task."""


class WorkerSpec(NamedTuple):
    """A worker with free capacity."""

    name: str
    speed: float = 1.0
    """Work per second: see `estimate_speeds`."""
    memory_gb: float | None = None
    """None: unknown, so every task fits."""
    bandwidth_mbps: float | None = None
    measured: bool = False
    """Whether the speed was measured; then it includes the time for the network."""
    capacity: int = 1
    """Tasks that it can run at a time."""


Match = dict[str, list[str]]
"""The ids of each machine's jobs. Machines without jobs are missing."""
Matching = Callable[[Sequence[PendingTask], Sequence[WorkerSpec]], Match]


def fits(job: PendingTask, machine: WorkerSpec) -> bool:
    return machine.memory_gb is None or job.memory_gb <= machine.memory_gb


def seconds(job: PendingTask, machine: WorkerSpec) -> float:
    """How long a machine is expected to take for a job."""
    travels = 0.0 if machine.measured or not machine.bandwidth_mbps else job.megabits / machine.bandwidth_mbps
    return job.work / machine.speed + travels


def lacking(job: PendingTask, machines: Sequence[WorkerSpec]) -> str:
    """Why a job fits none of these machines, as text; empty: it fits one, or there are no machines."""
    if not machines or any(fits(job, machine) for machine in machines):
        return ""
    largest = max(machines, key=lambda machine: machine.memory_gb or 0.0)
    return f"needs {job.memory_gb:.3g} GB of memory, and {largest.name}, which has the most, has {largest.memory_gb or 0.0:.3g}"


Rank = tuple[float, float, float, str]


def rank_of(job: PendingTask) -> Rank:
    """Order in which machines prefer jobs, smallest first: by priority, by memory, by remaining work, then by name.

    A task that needs much memory fits few machines, so these do it first; a large task that starts last delays the end of the run.
    """
    return (-job.priority, -job.memory_gb, -job.work, job.id)


def estimate_speeds(claimed: Mapping[str, float | None], measured: Mapping[str, float | None]) -> dict[str, float]:
    """Work per second of each worker, from what the settings claim and what was measured.

    A measurement overrides a claim. Claims are relative (a file says 100 and 200 of two machines), so the claim of a worker without a
    measurement is scaled by the median of measured / claimed over the other workers. A worker with neither gets the median speed.
    """
    ratios = [found / claim for name, claim in claimed.items() if claim and (found := measured.get(name))]
    scale = statistics.median(ratios) if ratios else 1.0
    known = {name: found for name, claim in claimed.items() if (found := measured.get(name) or (claim and claim * scale))}
    middle = statistics.median(known.values()) if known else 1.0
    return {name: known.get(name, middle) for name in claimed}


# --- priority ---------------------------------------------------------------------------------------------


def priority(jobs: Sequence[PendingTask], machines: Sequence[WorkerSpec]) -> Match:
    """Each task, in the order of priority and then of the list, takes the first worker that it fits."""
    return _in_turn(sorted(jobs, key=lambda job: -job.priority), machines, lambda job, free: free[0])


def _in_turn(
    jobs: Sequence[PendingTask], machines: Sequence[WorkerSpec], choose: Callable[[PendingTask, Sequence[WorkerSpec]], WorkerSpec]
) -> Match:
    """Each task, in this order, takes the worker that `choose` names among the free ones that it fits."""
    free_slots, match = {machine.name: machine.capacity for machine in machines}, Match()
    for job in jobs:
        if free := [machine for machine in machines if free_slots[machine.name] and fits(job, machine)]:
            taken = choose(job, free).name
            free_slots[taken] -= 1
            match.setdefault(taken, []).append(job.id)
        elif not any(free_slots.values()):
            break
    return match


# --- capability -------------------------------------------------------------------------------------------


def score(job: PendingTask, machine: WorkerSpec, fastest: float, widest: float) -> float:
    """How well a machine suits a job, from 0 to 1. Unknown properties of a machine count as average."""
    bandwidth = 0.5 if machine.bandwidth_mbps is None or not widest else machine.bandwidth_mbps / widest
    headroom = 0.5 if not machine.memory_gb else 1.0 - job.memory_gb / machine.memory_gb
    return _COMPUTE * (machine.speed / fastest if fastest else 0.0) + _BANDWIDTH * bandwidth + _HEADROOM * headroom


def capability(jobs: Sequence[PendingTask], machines: Sequence[WorkerSpec]) -> Match:
    """Each task, in the order of `rank_of`, takes the free worker with the best score for it."""
    fastest = max((machine.speed for machine in machines), default=0.0)
    widest = max((machine.bandwidth_mbps or 0.0 for machine in machines), default=0.0)

    def best(job: PendingTask, free: Sequence[WorkerSpec]) -> WorkerSpec:
        return max(free, key=lambda machine: score(job, machine, fastest, widest))

    return _in_turn(sorted(jobs, key=rank_of), machines, best)


# --- gale-shapley -----------------------------------------------------------------------------------------


def liked_by_job(job: PendingTask, machines: Sequence[WorkerSpec]) -> list[int]:
    """The machines that a job fits, best first: by expected time, then by memory."""
    suited = [index for index, machine in enumerate(machines) if fits(job, machine)]
    return sorted(suited, key=lambda index: (seconds(job, machines[index]), -(machines[index].memory_gb or 0.0), machines[index].name))


def gale_shapley(jobs: Sequence[PendingTask], machines: Sequence[WorkerSpec]) -> Match:
    """Stable matching: no task and worker both prefer each other to their match.

    Tasks propose, so each task gets the best worker that it has in any stable matching. A worker keeps the best proposals up to its
    capacity. With R fitting pairs there are at most R proposals.
    """
    chances = [iter(liked_by_job(job, machines)) for job in jobs]
    kept: list[list[tuple[Rank, int]]] = [[] for _ in machines]  # by machine: its jobs, the one that it prefers first
    proposing = list(range(len(jobs) - 1, -1, -1))
    while proposing:
        job = proposing.pop()
        index = next(chances[job], None)
        if index is None:
            continue  # every machine that it fits has better jobs
        bisect.insort(kept[index], (rank_of(jobs[job]), job))
        if len(kept[index]) > machines[index].capacity:
            proposing.append(kept[index].pop()[1])
    return {machine.name: [jobs[job].id for _, job in held] for machine, held in zip(machines, kept, strict=True) if held}


KINDS: Mapping[str, Matching] = {"priority": priority, "capability": capability, "gale-shapley": gale_shapley}
