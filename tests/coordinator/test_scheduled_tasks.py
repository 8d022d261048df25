"""Tasks in the coordinator: who has which piece of the data, and what happens when workers die, are slow or come back."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from shoal.config.schema.cluster import Host
from shoal.config.schema.strategy import Async, Edp, SyncPs
from shoal.coordinator import Coordinator
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit
from shoal.coordinator.driver import CoordinatorDriver
from shoal.coordinator.events import WorkerExited
from shoal.coordinator.run_plan import DataTask, TaskPlan
from shoal.scheduling import KINDS
from tests.coordinator.test_driver import Walker, World
from tests.support.small_cluster import Cluster, FakeWorker, believing, strategy_of


class Tasked(Cluster):
    """A cluster whose data is cut into tasks, and workers that go where they are told."""

    def __init__(self, tasks: TaskPlan, strategy: Any = None, total: int | None = None, **other: Any) -> None:
        super().__init__(strategy or strategy_of(Async()), **other)
        self.tasks = tasks
        self.plan = self.plan._replace(tasks=tasks, total_batches=total, batches_per_step=1)
        self.coordinator = believing(Coordinator(self.plan, self.strategy, self.learner))

    def work(self, worker: FakeWorker) -> str | None:
        """One step of a worker, where it was told to be."""
        worker.epoch, worker.position = worker.protocol.place
        return self.step(worker)

    def only_signs_of_life(self, *workers: FakeWorker) -> None:
        for _ in range(30):
            self.pass_time(4.0)
            for worker in workers:
                self.beat(worker)

    @property
    def learned(self) -> Counter[tuple[int, int]]:
        """How often each batch of each epoch is in the weights."""
        return Counter((one[6], batch) for line in self.ledger for one in line["from"] for batch in range(one[7] - one[8], one[7]))

    def holder(self, worker: FakeWorker) -> str:
        return self.coordinator.tasks.task_of(self.coordinator.members.by_name[worker.name])


def cut(*sizes: int, epochs: int | None = 1, kind: str = "gale-shapley", claims: dict[str, Host] | None = None, **of_all: Any) -> TaskPlan:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    tasks = tuple(DataTask(f"t{number}", end - size, end, **of_all) for number, (size, end) in enumerate(zip(sizes, ends, strict=True)))
    return TaskPlan(tasks, epochs, 1, KINDS[kind], claims or {})


@pytest.mark.parametrize("settings", [Async(), Edp(), SyncPs()])
def test_workers_go_from_task_to_task_and_no_batch_is_learned_from_twice(settings: Any) -> None:
    cluster = Tasked(cut(3, 2, 4, 3, epochs=2), strategy_of(settings), total=24)
    workers = [cluster.join(name, pull=False) for name in ("a", "b")]
    for worker in workers:
        cluster.pull(worker)
    for _ in range(12):
        calls = []
        for worker in workers:
            worker.epoch, worker.position = worker.protocol.place
            calls.append(cluster.contribute(worker))
        for worker, call in zip(workers, calls, strict=True):
            cluster.hear(worker, call)
    assert cluster.coordinator.finished
    assert cluster.learned == {(epoch, batch): 1 for epoch in range(2) for batch in range(12)}


def test_a_worker_is_told_with_its_receipt_where_to_go_on_and_where_that_ends() -> None:
    cluster = Tasked(cut(1, 2))
    worker = cluster.join("a")
    assert (cluster.holder(worker), worker.protocol.place, worker.protocol.until) == ("t1", (0, 1), 3)  # the larger one first
    cluster.work(worker)
    cluster.work(worker)
    assert (cluster.holder(worker), worker.protocol.place, worker.protocol.until) == ("t0", (0, 0), 1)


def test_the_faster_worker_has_the_larger_task_though_it_came_second() -> None:
    claims = {"slow": Host(flops=10.0), "fast": Host(flops=100.0)}
    cluster = Tasked(cut(2, 8, claims=claims))
    slow, fast = cluster.join("slow", pull=False), cluster.join("fast", pull=False)
    cluster.pull(slow)
    cluster.pull(fast)
    assert (cluster.holder(slow), cluster.holder(fast)) == ("t0", "t1")


@pytest.mark.parametrize("order", list(permutations(("datacenter", "edge", "volunteer"))))
@pytest.mark.parametrize("kind", ["gale-shapley", "capability"])
def test_workers_that_join_within_an_interval_are_matched_together_in_any_order(order: tuple[str, ...], kind: str) -> None:
    """Each asks for work as soon as it is here; the tasks, one of which only the largest machine can do, go as if all had come at once."""
    claims = {
        "datacenter": Host(flops=1000.0, memory_gb=64.0),
        "edge": Host(flops=50.0, memory_gb=8.0),
        "volunteer": Host(flops=100.0, memory_gb=16.0),
    }
    sizes = (("tiny", 0, 1, 1.0), ("huge", 1, 4, 32.0), ("large", 4, 9, 4.0))
    tasks = tuple(DataTask(name, first, end, memory_gb=memory_gb) for name, first, end, memory_gb in sizes)
    cluster = Tasked(TaskPlan(tasks, 1, 1, KINDS[kind], claims, interval_s=2.0))
    workers = []
    for name in order:
        workers.append(cluster.join(name, pull=False))
        assert cluster.pull(workers[-1])["reason"] == "no-task", "others may come"
        cluster.pass_time(0.9)
    cluster.pass_time(2.0)
    for worker in workers:
        cluster.pull(worker)
    matched = {worker.name: cluster.holder(worker) for worker in workers}
    assert matched == {"datacenter": "huge", "volunteer": "large", "edge": "tiny"}


def test_no_worker_waits_for_others_when_all_that_are_expected_are_here() -> None:
    cluster = Tasked(cut(4, 4)._replace(interval_s=1000.0, workers=2))
    workers = [cluster.join(name, pull=False) for name in ("a", "b")]
    for worker in workers:
        cluster.pull(worker)
    assert {cluster.holder(worker) for worker in workers} == {"t0", "t1"}


def test_a_larger_machine_that_comes_later_gets_the_task_that_fitted_no_other() -> None:
    claims = {"pi": Host(memory_gb=1.0), "mac": Host(memory_gb=8.0)}
    tasks = (DataTask("small", 0, 4, memory_gb=1.0), DataTask("huge", 4, 6, memory_gb=8.0))
    cluster = Tasked(TaskPlan(tasks, 1, 1, KINDS["gale-shapley"], claims), total=6)
    first = cluster.join("pi")
    cluster.work(first)
    second = cluster.join("mac")
    assert cluster.holder(second) == "huge"
    while not cluster.coordinator.finished:
        cluster.work(first if len(cluster.learned) % 2 else second)
    assert cluster.learned == {(0, batch): 1 for batch in range(6)}
    other = Coordinator(cluster.plan, cluster.strategy, type(cluster.learner)())
    for record, frames in cluster.records:
        other.replayed.apply(record, frames)
    assert vars(other.state) == vars(cluster.coordinator.state)


def test_the_task_of_a_dead_worker_goes_on_where_it_ended() -> None:
    cluster = Tasked(cut(6, 1))
    dead, other = cluster.join("a"), cluster.join("b")
    assert cluster.holder(dead) == "t0"
    cluster.work(dead)
    cluster.work(dead)
    for _ in range(4):
        cluster.pass_time(4.0)
        cluster.beat(other)
    assert "a" not in cluster.coordinator.members.by_name
    cluster.work(other)
    assert (cluster.holder(other), other.protocol.place) == ("t0", (0, 2))


def test_who_comes_back_has_the_task_that_it_had_unless_another_has_it() -> None:
    cluster = Tasked(cut(4, 4, 4, epochs=2))
    first = cluster.join("a")
    cluster.work(first)
    had = cluster.holder(first)
    cluster.leave(first)
    again = cluster.join("a", instance="another process")
    assert (cluster.holder(again), again.protocol.place[1]) == (had, first.protocol.place[1])
    cluster.leave(again)
    for name in ("b", "c", "d"):
        cluster.join(name)
    last = cluster.join("a", instance="a third")
    assert last.protocol.place[0] == 1, "all tasks of the first epoch have workers"


def test_results_of_a_task_that_another_worker_took_over_are_refused() -> None:
    cluster = Tasked(cut(50, 1))
    slow, fast = cluster.join("slow"), cluster.join("fast")
    cluster.work(slow)
    cluster.work(slow)
    slow.epoch, slow.position = slow.protocol.place
    cluster.only_signs_of_life(slow, fast)
    cluster.work(fast)
    assert (cluster.holder(fast), fast.protocol.place) == ("t0", (0, 2))
    assert cluster.step(slow) == "moved"
    assert cluster.holder(slow) != ""
    assert slow.protocol.place != fast.protocol.place
    assert cluster.learned[0, 2] == 0


def test_a_worker_whose_task_others_have_finished_long_ago_is_given_another() -> None:
    cluster = Tasked(cut(3, 1, epochs=3))
    slow, fast = cluster.join("slow"), cluster.join("fast")
    cluster.work(slow)
    slow.epoch, slow.position = slow.protocol.place
    cluster.only_signs_of_life(slow, fast)
    had = cluster.coordinator.members.by_name["slow"].seat
    for _ in range(6):
        assert cluster.work(fast) == "accepted"
    assert had not in cluster.coordinator.state.pieces, "it was finished, and the next epoch has begun"
    assert cluster.coordinator.tasks.finished_pieces >= 2
    assert cluster.step(slow) == "moved"
    assert cluster.holder(slow) != ""
    assert cluster.work(slow) == "accepted"
    assert max(cluster.learned.values()) == 1


def test_near_the_end_an_idle_worker_takes_over_batches_and_none_counts_twice() -> None:
    cluster = Tasked(cut(20, 2), total=22)
    slow, fast = cluster.join("slow"), cluster.join("fast")
    assert cluster.holder(slow) == "t0"
    cluster.work(slow)
    cluster.pass_time(1.0)
    cluster.work(slow)
    cluster.work(fast)
    cluster.pass_time(0.1)
    cluster.work(fast)
    assert cluster.holder(fast) == "t0", "it has a part of the other's task"
    assert slow.protocol.place[1] < fast.protocol.place[1] < 20
    while not cluster.coordinator.finished:
        for worker in (slow, fast, fast, fast):
            cluster.pass_time(0.1)
            cluster.work(worker)
    assert cluster.learned == {(0, batch): 1 for batch in range(22)}


def test_a_coordinator_that_takes_the_records_again_knows_who_has_what() -> None:
    cluster = Tasked(cut(20, 2, 3, epochs=2))
    workers = [cluster.join(name) for name in ("a", "b")]
    for _ in range(13):
        for worker in workers:
            cluster.pass_time(0.1)
            cluster.work(worker)
    other = Coordinator(cluster.plan, cluster.strategy, type(cluster.learner)())
    for record, frames in cluster.records:
        other.replayed.apply(record, frames)
    assert vars(other.state) == vars(cluster.coordinator.state)
    kept = Coordinator(cluster.plan, cluster.strategy, type(cluster.learner)())
    kept.load_state_dict(cluster.coordinator.replayed.state_dict())
    assert vars(kept.state) == vars(cluster.coordinator.state)


def test_a_task_that_fits_nobody_is_named_and_the_others_are_done() -> None:
    tasks = (DataTask("huge", 0, 2, memory_gb=64.0), DataTask("small", 2, 4, memory_gb=1.0))
    cluster = Tasked(TaskPlan(tasks, None, 1, KINDS["capability"], {"a": Host(memory_gb=8.0)}))
    worker = cluster.join("a")
    for _ in range(4):
        cluster.work(worker)
    cluster.pass_time(1.0)
    cluster.pass_time(1.0)
    assert (
        cluster.notes.count("warning: task huge needs 64 GB of memory, and a, which has the most, has 8: it waits for a worker with more")
        == 1
    )
    assert cluster.learned == {(epoch, batch): 1 for epoch in range(2) for batch in (2, 3)}


def test_a_worker_that_no_task_fits_is_told_why_it_is_not_let_in() -> None:
    from shoal.protocol.messages import PROTOCOL, Join

    cluster = Tasked(cut(2, claims={"pi": Host(memory_gb=1.0)}, memory_gb=4.0))
    answer = cluster.answers[cluster.ask_in(Join("pi", PROTOCOL, {}))]
    assert (answer["reason"], answer["detail"]) == ("unfit", "no task fits: t0 needs 4 GB of memory, and pi, which has the most, has 1")
    assert any("pi cannot take part" in note for note in cluster.notes)


def test_a_worker_cannot_claim_batches_that_are_not_its_own() -> None:
    cluster = Tasked(cut(4, 4))
    worker = cluster.join("a")
    other = cluster.join("b")
    worker.epoch, worker.position = other.protocol.place
    assert cluster.step(worker) == "moved"
    assert cluster.learned == {}


def test_batches_that_three_workers_failed_to_compute_are_given_up() -> None:
    cluster = Tasked(cut(2, 2, 2, 2, epochs=None))
    workers = [cluster.join(name) for name in ("a", "b", "c", "d")]
    bad, start = cluster.holder(workers[0]), workers[0].protocol.place
    for _ in range(40):
        for worker in workers:
            worker.epoch, worker.position = worker.protocol.place
            at_bad = cluster.holder(worker) == bad and worker.epoch == 0
            cluster.step(worker, position=worker.protocol.until + 1) if at_bad else cluster.step(worker)
    assert not any(batch in (start[1], start[1] + 1) for epoch, batch in cluster.learned if epoch == 0)
    assert max(epoch for epoch, _ in cluster.learned) > 3
    assert set(cluster.learned.values()) == {1}


class TaskedWorld(World):
    """Virtual time, a driver with its store, and data that is cut into tasks."""

    tasks = cut(9, 5, 7, 3, epochs=2)

    def begin(self, resume: bool) -> CoordinatorDriver:
        self.plan = self.plan._replace(tasks=self.tasks, total_batches=48, batches_per_step=2)
        return super().begin(resume)


@pytest.mark.parametrize("settings", [Async(contributions_per_update=2), Edp(pull_every_steps=2), SyncPs(round_timeout_s=5.0)])
def test_tasks_survive_a_coordinator_that_dies_twice_and_workers_that_die(tmp_path: Path, settings: Any) -> None:
    world = TaskedWorld(tmp_path, strategy_of(settings, 3), seed=3)
    for number in range(3):
        Walker(world, f"w{number}", 1.0 + number)
    for when, what in ((4.0, world.crash), (7.5, lambda: world.driver.handle(WorkerExited("w2"))), (11.0, world.crash)):
        world.at(when, what)
    world.run()
    found: list[str] = []
    evidence = gather(tmp_path / "coordinator", (tmp_path / "workers").glob("*.jsonl"), found)
    assert audit(evidence, found, tasks=True).violations == []
    assert world.driver.coordinator.state.batches >= 48


def test_an_audit_finds_a_batch_that_two_tasks_had(tmp_path: Path) -> None:
    world = TaskedWorld(tmp_path, strategy_of(Async()), seed=3)
    Walker(world, "w0", 1.0)
    world.run()
    evidence = gather(tmp_path / "coordinator", [], [])
    first = evidence.ledger[0][1]["from"][0]
    place, line = evidence.ledger[-1]
    other = [*line["from"][0][:5], 99, *first[6:]]
    evidence.ledger[-1] = (place, line | {"from": [other]})
    assert any("in epoch 0 is in w0's" in one for one in audit(evidence, [], tasks=True).violations)
    assert not any("in epoch 0 is in w0's" in one for one in audit(evidence, []).violations)
