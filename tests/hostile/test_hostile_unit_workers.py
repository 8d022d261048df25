"""A student that fails every unit cannot use up the attempts of a class."""

from __future__ import annotations

from typing import Any

import torch
from tiny_cluster import Cluster, FakeWorker, contribution, strategy_of

from shoal.config.schema.strategy import WorkUnits
from shoal.config.schema.updates import NoCodec
from shoal.coordinator import Coordinator
from shoal.coordinator.state import Opened
from shoal.coordinator.units import Cut
from shoal.updates import codecs
from shoal.worker.protocol import Unit


def class_of(*names: str) -> tuple[Cluster, list[FakeWorker]]:
    """Ten epochs of twenty units, each tried twice at most; a batch has four samples."""
    cluster = Cluster(strategy_of(WorkUnits(batches_per_unit=1, units_per_update=2)))
    cluster.plan = cluster.plan._replace(
        cut=Cut(20, 1, 10),
        total_batches=200,
        lease_s=1000.0,
        attempts=2,
        samples_per_batch=4,
        samples_per_epoch=78,
        heartbeat_interval_s=1e6,
    )
    believed = cluster.coordinator.door.is_proved
    cluster.coordinator = Coordinator(cluster.plan, cluster.strategy, cluster.learner)
    cluster.coordinator.door.is_proved = believed
    cluster.carry_out(cluster.coordinator.handle(Opened(), cluster.now))
    return cluster, [cluster.join(name) for name in names]


def lease(cluster: Cluster, worker: FakeWorker) -> Unit | None:
    """A unit; None where the coordinator gives none, or does not want the worker any more."""
    worker.protocol.claim()
    call = cluster.say(worker)
    if call not in cluster.answers:
        cluster.pass_time(10.0)
    events = worker.protocol.hear(cluster.answers[call], cluster.frames[call])
    return next((event for event in events if isinstance(event, Unit)), None)


def fail(cluster: Cluster, worker: FakeWorker) -> bool:
    unit = lease(cluster, worker)
    if unit is not None:
        worker.protocol.fail(unit.number, "I do not feel like it")
        cluster.hear(worker, cluster.say(worker))
    return unit is not None


def deliver(cluster: Cluster, worker: FakeWorker, **claims: Any) -> None:
    unit = lease(cluster, worker)
    assert unit is not None
    made = contribution(unit.epoch, unit.start + unit.batches, worker.protocol.have, unit=unit.number, **claims)
    worker.protocol.contribute(made, codecs.encode(NoCodec(), torch.ones(4), None), pulls=False)
    cluster.hear(worker, cluster.say(worker))


def test_a_worker_that_fails_what_others_manage_is_kept_out_and_everybody_is_told() -> None:
    cluster, (ada, eve) = class_of("ada", "eve")
    deliver(cluster, ada)
    failed = 0
    while "eve" in cluster.coordinator.members.by_name:
        failed += fail(cluster, eve)
    assert failed == 5
    assert any("eve failed 5 units in a row that others manage" in note and "feel like it" in note for note in cluster.notes)
    assert cluster.coordinator.book.settled.failed == 0, "no unit is given up"
    worker = FakeWorker("eve")
    cluster.hear(worker, cluster.say(worker))
    answer = cluster.answers[cluster.say(worker)]
    assert (answer["reason"], "failed what others manage" in answer["detail"]) == ("quarantined", True)
    deliver(cluster, ada)
    cluster.pass_time(601.0)
    assert cluster.join("eve", pull=False).name == "eve", "it may try again later"


def test_a_worker_that_fails_everything_waits_until_another_has_shown_whether_it_can_be_done() -> None:
    cluster, (_, eve) = class_of("ada", "eve")
    assert [fail(cluster, eve) for _ in range(8)] == [True] * 5 + [False] * 3
    assert cluster.coordinator.book.settled.failed == 0


def test_a_worker_alone_is_not_kept_from_its_units() -> None:
    cluster, (eve,) = class_of("eve")
    assert all(fail(cluster, eve) for _ in range(70))
    assert cluster.coordinator.book.settled.failed > 0


def test_samples_of_a_unit_are_those_that_it_has() -> None:
    cluster, (ada,) = class_of("ada")
    for _ in range(20):
        deliver(cluster, ada, samples=4_000_000_000, weight=1e12)
    assert cluster.coordinator.state.samples == 78, "the last batch of the epoch is smaller"
    assert cluster.published[0].weight == 8
