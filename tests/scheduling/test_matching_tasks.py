"""Which worker does which task: the three ways, a checker of stable matchings that knows nothing of how they are found, and thefts."""

from __future__ import annotations

import itertools
import random

from shoal.scheduling import KINDS, Match, PendingTask, RemainingWork, StolenShare, WorkerSpec, lacking, worth_stealing
from shoal.scheduling.matching import capability, estimate_speeds, gale_shapley, priority

FAST, SLOW = WorkerSpec("fast", speed=10.0, memory_gb=8.0), WorkerSpec("slow", speed=1.0, memory_gb=4.0)


def random_instance(seed: int) -> tuple[list[PendingTask], list[WorkerSpec]]:
    """Many ties, tasks that fit few machines or none, machines with room for several, and more of one side than of the other."""
    draw = random.Random(seed)
    machines = [
        WorkerSpec(
            f"m{number}",
            speed=draw.choice([0.5, 1.0, 2.0, draw.uniform(0.1, 9.0)]),
            memory_gb=draw.choice([None, 1.0, 4.0, draw.uniform(0.5, 8.0)]),
            bandwidth_mbps=draw.choice([None, 5.0, 100.0]),
            measured=draw.random() < 0.3,
            capacity=draw.randint(1, 3),
        )
        for number in range(draw.randint(1, 6))
    ]
    jobs = [
        PendingTask(
            f"j{number}",
            draw.choice([1.0, 5.0, draw.uniform(0.1, 9.0)]),
            draw.choice([0.0, 2.0, 9.0]),
            draw.randint(1, 3),
            draw.uniform(0, 50),
        )
        for number in range(draw.randint(1, 9))
    ]
    return jobs, machines


# --- a checker that shares no code with the matching ------------------------------------------------------


def time_for(job: PendingTask, machine: WorkerSpec) -> float:
    network = job.megabits / machine.bandwidth_mbps if machine.bandwidth_mbps and not machine.measured else 0.0
    return job.work / machine.speed + network


def job_prefers(job: PendingTask, one: WorkerSpec, other: WorkerSpec | None) -> bool:
    if other is None:
        return True
    free = [-(machine.memory_gb or 0.0) for machine in (one, other)]
    return (time_for(job, one), free[0], one.name) < (time_for(job, other), free[1], other.name)


def machine_prefers(one: PendingTask, other: PendingTask) -> bool:
    if one.priority != other.priority:
        return one.priority > other.priority
    if one.memory_gb != other.memory_gb:
        return one.memory_gb > other.memory_gb
    return one.work > other.work if one.work != other.work else one.id < other.id


def blocking_pairs(jobs: list[PendingTask], machines: list[WorkerSpec], match: Match) -> list[tuple[str, str]]:
    """Pairs that fit and would both rather have each other."""
    by_id = {job.id: job for job in jobs}
    owner = {job: machine for machine in machines for job in match.get(machine.name, [])}
    found = []
    for job, machine in itertools.product(jobs, machines):
        if machine.memory_gb is not None and job.memory_gb > machine.memory_gb:
            continue
        has = [by_id[name] for name in match.get(machine.name, [])]
        if job in has or not job_prefers(job, machine, owner.get(job.id)):
            continue
        if len(has) < machine.capacity or any(machine_prefers(job, held) for held in has):
            found.append((job.id, machine.name))
    return found


def is_allowed(jobs: list[PendingTask], machines: list[WorkerSpec], match: Match) -> bool:
    by_id, given = {job.id: job for job in jobs}, [job for held in match.values() for job in held]
    room = all(len(match.get(machine.name, [])) <= machine.capacity for machine in machines)
    memory = all(
        machine.memory_gb is None or by_id[job].memory_gb <= machine.memory_gb
        for machine in machines
        for job in match.get(machine.name, [])
    )
    return room and memory and len(given) == len(set(given)) and set(match) <= {machine.name for machine in machines}


def test_gale_shapley_leaves_no_blocking_pair_in_ten_thousand_random_instances() -> None:
    for seed in range(10_000):
        jobs, machines = random_instance(seed)
        match = gale_shapley(jobs, machines)
        assert is_allowed(jobs, machines, match), seed
        assert blocking_pairs(jobs, machines, match) == [], seed


def test_the_checker_finds_a_pair_that_was_torn_apart() -> None:
    jobs = [PendingTask("large", 9.0), PendingTask("small", 1.0)]
    assert blocking_pairs(jobs, [FAST, SLOW], {"fast": ["large"], "slow": ["small"]}) == []
    assert blocking_pairs(jobs, [FAST, SLOW], {"fast": ["small"], "slow": ["large"]}) == [("large", "fast")]


def test_each_task_gets_the_best_worker_that_it_has_in_any_stable_matching() -> None:
    for seed in range(400):
        jobs, machines = random_instance(seed)
        jobs, machines = jobs[:4], [machine._replace(capacity=1) for machine in machines[:4]]
        found = gale_shapley(jobs, machines)
        got = {job: machine for machine in machines for job in found.get(machine.name, [])}
        for choice in itertools.product([None, *machines], repeat=len(jobs)):
            match: Match = {}
            for job, machine in zip(jobs, choice, strict=True):
                if machine is not None:
                    match.setdefault(machine.name, []).append(job.id)
            if not is_allowed(jobs, machines, match) or blocking_pairs(jobs, machines, match):
                continue
            for job, machine in zip(jobs, choice, strict=True):
                assert machine is None or machine is got[job.id] or job_prefers(job, got[job.id], machine), seed


# --- the other ways ---------------------------------------------------------------------------------------


def test_every_way_gives_each_task_once_and_only_where_it_fits() -> None:
    for seed in range(500):
        jobs, machines = random_instance(seed)
        for match in KINDS.values():
            assert is_allowed(jobs, machines, match(jobs, machines))
            assert match(jobs, machines) == match(jobs, machines)


def test_by_priority_the_most_urgent_task_takes_the_first_worker_that_it_fits() -> None:
    jobs = [PendingTask("later", 1.0), PendingTask("urgent", 1.0, memory_gb=6.0, priority=5)]
    assert priority(jobs, [SLOW, FAST]) == {"fast": ["urgent"], "slow": ["later"]}
    assert priority([PendingTask("first", 1.0), PendingTask("second", 1.0)], [SLOW]) == {"slow": ["first"]}


def test_by_capability_speed_bandwidth_and_free_memory_make_the_score() -> None:
    job = [PendingTask("one", 1.0, memory_gb=2.0)]
    assert capability(job, [SLOW, FAST]) == {"fast": ["one"]}
    wide, narrow = WorkerSpec("wide", bandwidth_mbps=100.0), WorkerSpec("narrow", bandwidth_mbps=5.0)
    assert capability(job, [narrow, wide]) == {"wide": ["one"]}
    roomy, tight = WorkerSpec("roomy", memory_gb=64.0), WorkerSpec("tight", memory_gb=2.1)
    assert capability(job, [tight, roomy]) == {"roomy": ["one"]}


def test_a_task_that_fits_nobody_says_what_it_lacks() -> None:
    assert lacking(PendingTask("huge", 1.0, memory_gb=32.0), [SLOW, FAST]) == "needs 32 GB of memory, and fast, which has the most, has 8"
    assert lacking(PendingTask("small", 1.0, memory_gb=1.0), [SLOW, FAST]) == ""
    assert lacking(PendingTask("any", 1.0, memory_gb=99.0), [SLOW, WorkerSpec("unknown")]) == ""


# --- speeds and thefts ------------------------------------------------------------------------------------


def test_claimed_speeds_count_until_measured_and_are_scaled_by_those_of_others() -> None:
    claims = {"a": 100.0, "b": 200.0, "c": None}
    assert estimate_speeds(claims, {}) == {"a": 100.0, "b": 200.0, "c": 150.0}
    assert estimate_speeds(claims, {"a": 5.0}) == {"a": 5.0, "b": 10.0, "c": 7.5}
    assert estimate_speeds(claims, {"a": 5.0, "b": 2.0, "c": 3.0}) == {"a": 5.0, "b": 2.0, "c": 3.0}
    assert estimate_speeds({"x": None}, {}) == {"x": 1.0}


def test_an_idle_worker_takes_so_much_of_the_last_one_that_both_are_done_together() -> None:
    burdens = [RemainingWork("short", 10, 1.0), RemainingWork("long", 30, 2.0)]
    assert worth_stealing(burdens, 1.0) == StolenShare("long", keep=10)  # 10 × 2 s here, 20 × 1 s there
    assert worth_stealing(burdens, 2.0) == StolenShare("long", keep=15)


def test_nothing_is_taken_that_would_not_be_done_sooner() -> None:
    assert worth_stealing([RemainingWork("nearly done", 2, 1.0)], 1.0) is None
    assert worth_stealing([RemainingWork("three", 3, 1.0)], 100.0) is None
    assert worth_stealing([], 1.0) is None
