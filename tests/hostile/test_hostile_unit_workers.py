"""A student that fails every unit cannot use up the attempts of a class, under one name or many; and none keeps units for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shoal.config.schema.strategy import WorkUnits
from shoal.config.schema.updates import NoCodec
from shoal.coordinator import Coordinator
from shoal.coordinator.events import RequestReceived, ServingStarted
from shoal.coordinator.run_plan import MemberLimits
from shoal.coordinator.units.cut import DataCut
from shoal.coordinator.units.lease_table import PATIENCE_LEASES
from shoal.protocol.messages import WorkerRequest, header_of, parse
from shoal.updates import codecs
from shoal.worker.session import LeasedUnit, SessionEndedError
from tests.support.small_cluster import Cluster, FakeWorker, contribution, strategy_of


class Invited(Cluster):
    """A cluster whose newcomers come on the invitation of a guest, where one is named."""

    guest = ""

    def ask(self, asked: WorkerRequest, frames: Sequence[bytes | memoryview] = ()) -> int:
        self.calls += 1
        event = RequestReceived(self.calls, parse(header_of(asked)), frames, f"session-{self.calls}", guest=self.guest)
        self.carry_out(self.coordinator.handle(event, self.now))
        return self.calls


def class_of(*names: str, guests: dict[str, int] | None = None) -> tuple[Invited, list[FakeWorker]]:
    """Ten epochs of twenty units, each tried twice at most; a batch has four samples."""
    cluster = Invited(strategy_of(WorkUnits(batches_per_unit=1, units_per_update=2)))
    cluster.plan = cluster.plan._replace(
        cut=DataCut(20, 1, 10),
        total_batches=200,
        lease_s=1000.0,
        attempts=2,
        samples_per_batch=4,
        samples_per_epoch=78,
        heartbeat_interval_s=1e6,
        bounds=MemberLimits(guests=guests or {}),
    )
    believed = cluster.coordinator.authenticator.is_proved
    cluster.coordinator = Coordinator(cluster.plan, cluster.strategy, cluster.learner)
    cluster.coordinator.authenticator.is_proved = believed
    cluster.carry_out(cluster.coordinator.handle(ServingStarted(), cluster.now))
    return cluster, [cluster.join(name) for name in names]


def lease(cluster: Cluster, worker: FakeWorker) -> LeasedUnit | None:
    """A unit; None where the coordinator gives none, or does not want the worker any more."""
    worker.protocol.claim()
    call = cluster.say(worker)
    if call not in cluster.answers:
        cluster.pass_time(10.0)
    events = worker.protocol.on_answer(cluster.answers[call], cluster.frames[call])
    return next((event for event in events if isinstance(event, LeasedUnit)), None)


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
    assert cluster.coordinator.replayed.settled.failed == 0, "no unit is given up"
    worker = FakeWorker("eve")
    cluster.hear(worker, cluster.say(worker))
    answer = cluster.answers[cluster.say(worker)]
    assert (answer["reason"], "failed what others manage" in answer["detail"]) == ("quarantined", True)
    deliver(cluster, ada)
    cluster.pass_time(601.0)
    assert cluster.join("eve", pull=False).name == "eve", "it may try again later"


def test_a_worker_that_fails_everything_waits_until_another_has_tried() -> None:
    cluster, (_, eve) = class_of("ada", "eve")
    assert [fail(cluster, eve) for _ in range(8)] == [True] * 5 + [False] * 3
    assert cluster.coordinator.replayed.settled.failed == 0


def test_a_worker_alone_is_not_kept_from_its_units() -> None:
    cluster, (eve,) = class_of("eve")
    failed = 0
    while fail(cluster, eve):
        failed += 1
    assert failed > 5 * 2, "each unit on offer twice"
    (told,) = [note for note in cluster.notes if "no connected worker has completed one yet: I do not feel like it" in note]
    assert "Such units wait 4000 s for a worker that can do them" in told
    for _ in range(PATIENCE_LEASES - 1):
        cluster.pass_time(1000.0)
        assert fail(cluster, eve), "it may have been a passing problem"
    assert cluster.coordinator.replayed.settled.failed == 0
    cluster.pass_time(1000.0)
    assert fail(cluster, eve)
    assert cluster.coordinator.replayed.settled.failed == 1, "a run that cannot work ends all the same"


def test_a_crowd_that_came_before_the_class_gives_nothing_up() -> None:
    cluster, eves = class_of("eve0", "eve1", "eve2")
    for _ in range(PATIENCE_LEASES - 1):
        for eve in eves:
            while fail(cluster, eve):
                pass
        cluster.pass_time(1000.0)
    ada = cluster.join("ada")
    for _ in range(4):
        deliver(cluster, ada)
    assert cluster.coordinator.replayed.settled.failed == 0
    assert cluster.coordinator.state.version == 2


def test_a_crowd_that_waits_for_units_is_not_looked_through_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, (ada, *eves) = class_of("ada", *(f"eve{number}" for number in range(20)))
    for eve in eves:
        while fail(cluster, eve):
            pass
    for eve in eves:
        eve.protocol.claim()
        cluster.say(eve)
    coordinator = cluster.coordinator
    assert coordinator.units is not None
    assert len(coordinator.units.claims) == 20
    at_work, looks = coordinator.members.at_work, list[int]()
    monkeypatch.setattr(coordinator.members, "at_work", lambda: (looks.append(1), at_work())[1])
    cluster.beat(ada)
    assert len(looks) == 1, "once for all who wait"


def test_names_that_did_nothing_leave_no_trace() -> None:
    cluster, (eve,) = class_of("eve")
    assert fail(cluster, eve)
    cluster.leave(cluster.join("eve", instance="another"))
    lender = cluster.coordinator.units
    assert lender is not None
    assert "eve" in lender.leases.workers
    cluster.pass_time(601.0)
    kept = [vars(cluster.coordinator.members), vars(lender.leases), vars(cluster.coordinator.state)]
    assert [name for part in kept for name, value in part.items() if isinstance(value, dict) and "eve" in value] == []


def test_samples_of_a_unit_are_those_that_it_has() -> None:
    cluster, (ada,) = class_of("ada")
    for _ in range(20):
        deliver(cluster, ada, samples=4_000_000_000, weight=1e12)
    assert cluster.coordinator.state.samples == 78, "the last batch of the epoch is smaller"
    assert cluster.published[0].weight == 8


def test_sixty_new_names_that_fail_everything_cost_a_class_no_unit() -> None:
    cluster, (ada,) = class_of("ada")
    for number in range(20):
        eves = [cluster.join(f"eve{number}-{n}") for n in range(3)]
        for _ in range(5):
            for eve in eves:
                assert eve.name not in cluster.coordinator.members.by_name or fail(cluster, eve)
        deliver(cluster, ada)
        deliver(cluster, ada)
    assert cluster.coordinator.replayed.settled.failed == 0
    assert cluster.coordinator.state.version == 20


def test_one_result_does_not_buy_the_right_to_end_units() -> None:
    cluster, (ada,) = class_of("ada")
    eves = [cluster.join(f"eve{n}") for n in range(40)]
    for eve in eves:
        deliver(cluster, eve)
    for _ in range(4):
        deliver(cluster, ada)
    for _ in range(4):
        for eve in eves:
            fail(cluster, eve)
    assert cluster.coordinator.replayed.settled.failed == 0


def test_a_quarantine_holds_for_newcomers_on_the_same_invitation() -> None:
    cluster, (ada,) = class_of("ada", guests={"eve": 2})
    cluster.guest = "eve"
    honest, hostile = cluster.join("laptop"), cluster.join("eve1")
    deliver(cluster, honest)
    cluster.guest = ""
    deliver(cluster, ada)
    while "eve1" in cluster.coordinator.members.by_name:
        assert fail(cluster, hostile)
    assert any("is kept out, with newcomers on the invitation of eve, for 600 s" in note for note in cluster.notes)
    cluster.guest = "eve"
    with pytest.raises(
        SessionEndedError, match="a worker of eve failed what others manage: newcomers on that invitation may come in 600 s"
    ):
        cluster.join("eve2")
    deliver(cluster, honest)
    cluster.leave(honest)
    assert cluster.join("laptop").name == "laptop", "whose results were used is no newcomer"
    cluster.pass_time(601.0)
    assert cluster.join("eve2").name == "eve2"


def test_units_that_a_crowd_holds_back_go_to_idle_workers_with_a_message() -> None:
    cluster, (ada,) = class_of("ada")
    eves = [cluster.join(f"eve{n}") for n in range(64)]
    for eve in eves:
        assert lease(cluster, eve) is not None
    assert lease(cluster, ada) is None
    for _ in range(9):
        cluster.pass_time(99.0)
        for eve in eves:
            cluster.beat(eve)
    assert lease(cluster, ada) is None, "a lease's time is everybody's"
    cluster.pass_time(120.0)
    for _ in range(64):
        deliver(cluster, ada)
    assert cluster.coordinator.state.version == 32
    assert any("eve0 has held unit 0 for" in note and "ada has nothing to do" in note for note in cluster.notes)
    assert cluster.coordinator.members.by_name["eve0"].failed == 1, "it counts with whoever held the unit"
    eves[0].protocol.on_heartbeat_answer(cluster.beat(eves[0]))
    assert "given this worker's unit to another one: it was held for longer than others need" in eves[0].protocol.notice
    assert "word" not in cluster.beat(eves[0])


def test_a_class_in_which_everybody_fails_ends_with_its_reason() -> None:
    cluster, workers = class_of("ada", "bob", "cid")
    for _ in range(2000):
        if cluster.coordinator.finished:
            break
        for worker in workers:
            fail(cluster, worker)
    assert cluster.coordinator.finished
    assert cluster.coordinator.replayed.settled.failed == 200
    assert any("is given up: I do not feel like it" in note for note in cluster.notes)
