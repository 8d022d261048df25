"""How long 40 unequal workers take for 400 tasks while some of them die, by scheduler, on a virtual clock.

The schedulers are the functions that a coordinator calls, with what it would know: claims that are off by a third, speeds that it measures
contribution by contribution, and deaths that it hears of after three missed heartbeats. First come, first served is the peer: a free worker
takes the first task that it fits, and keeps it. The bound is a linear programme that knows speeds and deaths beforehand, and may cut tasks
as finely as it likes.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from run import Row
from scipy.optimize import linprog

from shoal.scheduling import KINDS, Match, PendingTask, RemainingWork, WorkerSpec, worth_stealing
from shoal.scheduling.matching import estimate_speeds, fits

WORKERS, TASKS, DEATHS, SEEDS = 40, 400, 8, 20
HEARD_AFTER_S = 15.0
ALPHA = 0.2
SPREADS = (0.3, 0.6, 1.0)


@dataclass
class Task:
    """What is left of a task, in contributions."""

    id: str
    memory_gb: float
    left: int
    holder: str = ""


@dataclass
class Worker:
    """A worker, and what is known of it."""

    name: str
    speed: float
    claim: float
    memory_gb: float
    dies_at: float = float("inf")
    task: Task | None = None
    rate: float | None = None
    since: float = 0.0
    """When it began, or sent its last contribution."""
    heard_of: bool = False
    """Whether its death is known."""


@dataclass
class World:
    """Workers, tasks and a clock."""

    workers: dict[str, Worker]
    tasks: list[Task]
    match: Callable[[list[PendingTask], list[WorkerSpec]], Match]
    steals: bool
    now: float = 0.0
    heap: list[tuple[float, int, str]] = field(default_factory=list)
    count: itertools.count[int] = field(default_factory=itertools.count)

    def run(self) -> float:
        """Until everything is done; when that is."""
        for worker in self.workers.values():
            if worker.dies_at < float("inf"):
                heapq.heappush(self.heap, (worker.dies_at + HEARD_AFTER_S, next(self.count), worker.name))
        self.deal()
        while any(task.left for task in self.tasks):
            self.now, _, name = heapq.heappop(self.heap)
            self.happen(self.workers[name])
        return self.now

    def happen(self, worker: Worker) -> None:
        if self.now >= worker.dies_at:
            if self.now >= worker.dies_at + HEARD_AFTER_S and not worker.heard_of:
                worker.heard_of = True
                if worker.task is not None:
                    worker.task.holder, worker.task = "", None
                self.deal()
            return None
        task = worker.task
        assert task is not None
        rate = 1 / (self.now - worker.since)
        worker.rate = rate if worker.rate is None else ALPHA * rate + (1 - ALPHA) * worker.rate
        task.left -= 1
        if task.left:
            return self.begin(worker, task)
        worker.task = None
        return self.deal()

    def begin(self, worker: Worker, task: Task) -> None:
        worker.task, worker.since, task.holder = task, self.now, worker.name
        heapq.heappush(self.heap, (self.now + 1 / worker.speed, next(self.count), worker.name))

    # --- what a coordinator does ---------------------------------------------------------------------

    def deal(self) -> None:
        """Give those who have nothing what nobody has; then what others would be done with last."""
        idle = {name: worker for name, worker in self.workers.items() if worker.task is None and not worker.heard_of}
        if not idle:
            return
        speeds = estimate_speeds(
            {one.name: one.claim for one in self.workers.values()}, {one.name: one.rate for one in self.workers.values()}
        )
        free = {task.id: task for task in self.tasks if task.left and not task.holder}
        jobs = [PendingTask(task.id, task.left, task.memory_gb) for task in free.values()]
        machines = [WorkerSpec(name, speeds[name], worker.memory_gb, measured=worker.rate is not None) for name, worker in idle.items()]
        for name, (job, *_) in (self.match(jobs, machines) if jobs else {}).items():
            self.begin(idle.pop(name), free[job])
        for worker in idle.values() if self.steals else ():
            self.steal(worker, speeds)

    def steal(self, worker: Worker, speeds: dict[str, float]) -> None:
        held = {task.id: task for task in self.tasks if task.left and task.holder and task.memory_gb <= worker.memory_gb}
        burdens = [RemainingWork(task.id, task.left, self.piece_s(self.workers[task.holder], speeds)) for task in held.values()]
        theft = worth_stealing(burdens, 1 / speeds[worker.name])
        if theft is None:
            return
        task = held[theft.job]
        taken = Task(f"{task.id}.{next(self.count)}", task.memory_gb, task.left - theft.keep)
        task.left = theft.keep
        self.tasks.append(taken)
        self.begin(worker, taken)

    def piece_s(self, worker: Worker, speeds: dict[str, float]) -> float:
        return max(1 / speeds[worker.name], self.now - worker.since)


def first_come(jobs: list[PendingTask], machines: list[WorkerSpec]) -> Match:
    """The first task in the list that a free worker fits; workers in the order in which they are listed."""
    left, match = list(jobs), Match()
    for machine in machines:
        job = next((job for job in left if fits(job, machine)), None)
        if job is not None:
            left.remove(job)
            match[machine.name] = [job.id]
    return match


def instance(spread: float, seed: int) -> tuple[list[Worker], list[Task]]:
    """Workers whose speeds are spread log-normally; half of them have little memory, and a quarter of the tasks needs much."""
    draw = random.Random(f"{spread} {seed}")
    workers = []
    for number in range(WORKERS):
        speed = draw.lognormvariate(0.0, spread)
        workers.append(Worker(f"w{number}", speed, speed * draw.lognormvariate(0.0, 0.3), draw.choice((4.0, 16.0))))
    tasks = [Task(f"t{number}", draw.choice((1.0, 1.0, 1.0, 8.0)), draw.randint(20, 60)) for number in range(TASKS)]
    about = sum(task.left for task in tasks) / sum(worker.speed for worker in workers)
    for worker in draw.sample(workers, DEATHS):
        worker.dies_at = draw.uniform(0.1, 0.9) * about
    return workers, tasks


def bound(workers: list[Worker], tasks: list[Task]) -> float:
    """The least time in which anybody could do it: how long each worker is at tasks of each kind, and nobody longer than it lives."""
    kinds = sorted({task.memory_gb for task in tasks})
    count = len(workers) * len(kinds)
    doing, until, limits = np.zeros((len(kinds), count + 1)), np.zeros((len(workers), count + 1)), list[tuple[float, float | None]]()
    alive = np.zeros((len(workers), count + 1))
    for index, worker in enumerate(workers):
        for kind, memory in enumerate(kinds):
            column = index * len(kinds) + kind
            doing[kind, column], until[index, column], alive[index, column] = worker.speed, 1.0, 1.0
            limits.append((0.0, None if memory <= worker.memory_gb else 0.0))
        until[index, count] = -1.0
    work = [sum(task.left for task in tasks if task.memory_gb == memory) for memory in kinds]
    lives = [min(worker.dies_at, 1e9) for worker in workers]
    found = linprog(
        c=[0.0] * count + [1.0],
        A_eq=doing,
        b_eq=work,
        A_ub=np.vstack([until, alive]),
        b_ub=[0.0] * len(workers) + lives,
        bounds=[*limits, (0.0, None)],
    )
    assert found.status == 0, found.message
    return float(found.fun)


def makespan(kind: str, spread: float, seed: int) -> float:
    workers, tasks = instance(spread, seed)
    match = first_come if kind == "first come" else KINDS[kind]
    return World({worker.name: worker for worker in workers}, tasks, match, kind != "first come").run()


def measure(seeds: int = SEEDS) -> list[Row]:
    rows = []
    for spread in SPREADS:
        least = [bound(*instance(spread, seed)) for seed in range(seeds)]
        first = [makespan("first come", spread, seed) for seed in range(seeds)]
        for kind in KINDS:
            took = [makespan(kind, spread, seed) for seed in range(seeds)]
            closed = sum(a - b for a, b in zip(first, took, strict=True)) / sum(a - b for a, b in zip(first, least, strict=True))
            ratio = statistics.mean(a / b for a, b in zip(took, least, strict=True))
            worst = max(a / b for a, b in zip(took, least, strict=True))
            of_first = statistics.mean(a / b for a, b in zip(first, least, strict=True))
            note = f"first come, first served {of_first:.3f} of the bound; {closed:.1%} of the gap closed; worst seed {worst:.3f}"
            ours, peer = statistics.mean(took), statistics.mean(least)
            rows.append(Row(f"makespan σ {spread}, {kind}, of the bound", ours, peer, "s", ratio, "≤ 1.15, ≥ 90 % closed", note))
    return rows
