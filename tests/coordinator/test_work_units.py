"""Units of the data: every one is learned from once, in whatever order they come in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.schema.strategy import WorkUnits
from shoal.config.schema.updates import Krum, NoCodec, Updates
from shoal.coordinator import Coordinator
from shoal.coordinator.effects import Effect, Issue, LedgerEntry, Note, Persist, Published
from shoal.coordinator.events import LeaseResult, RunConcluded, ServingStarted
from shoal.coordinator.run_plan import RunPlan
from shoal.coordinator.units.cut import DataCut, SettledUnits
from shoal.protocol.messages import BadMessage, Delivered, Failed, parse, parse_from_leases
from shoal.updates import codecs
from shoal.worker.session import LeasedUnit
from tests.support.small_cluster import Cluster, FakeWorker, Numbers, believing, contribution, encoded, strategy_of


def made(quorum: int = 3, cut: DataCut | None = None, needed: int = 1, updates: Updates | None = None) -> Coordinator:
    cut = cut or DataCut(batches_per_epoch=10, batches_per_unit=2, total_epochs=2)
    strategy = strategy_of(WorkUnits(units_per_update=quorum))
    total = cut.batches_per_epoch * cut.total_epochs
    plan = RunPlan(updates or Updates(), 0, 1, needed, 10**6, total, cut.batches_per_unit * quorum, 5.0, 0.5, cut, 300.0, 3, True)
    return believing(Coordinator(plan, strategy, Numbers()))


class Board:
    """Leases, kept in memory: what is on offer, what was cancelled, and what came of it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.offered: set[int] = set()
        self.version, self.seq, self.now = 0, 0, 0.0
        self.records: list[tuple[dict[str, Any], tuple[bytes, ...]]] = []
        self.ledger: list[dict[str, Any]] = []
        self.published: list[Published] = []
        self.notes: list[str] = []
        self.carry_out(coordinator.handle(ServingStarted(), self.now))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Issue):
                if effect.version != self.version:
                    self.offered, self.version = set(), effect.version
                self.offered |= set(effect.units)
            elif isinstance(effect, Persist):
                self.records.append((effect.record, tuple(bytes(frame) for frame in effect.frames)))
            elif isinstance(effect, LedgerEntry):
                self.ledger.append(effect.line)
            elif isinstance(effect, Published):
                self.published.append(effect)
            elif isinstance(effect, Note):
                self.notes.append(effect.text)

    def deliver(self, number: int, worker: str = "w", value: float = 1.0, frames: Any = None, base: int | None = None) -> None:
        self.offered.discard(number)
        self.seq += 1
        assert self.coordinator.plan.cut is not None
        unit = self.coordinator.plan.cut.unit(number)
        base = self.version if base is None else base
        asked = Delivered(worker, self.seq, base, float(unit.batches), unit.batches, *unit, {"loss": value})
        content = codecs.encode(NoCodec(), torch.full((4,), value), None) if frames is None else frames
        self.carry_out(self.coordinator.handle(LeaseResult(asked, content), self.now))

    def fail(self, number: int) -> None:
        self.offered.discard(number)
        assert self.coordinator.plan.cut is not None
        self.carry_out(self.coordinator.handle(LeaseResult(Failed(*self.coordinator.plan.cut.unit(number), "broken"), ()), self.now))

    def spans(self) -> list[tuple[int, int, int]]:
        """(epoch, first batch, batches) of everything in the weights or given up, in order."""
        learned = [(line[6], line[7] - line[8], line[8]) for entry in self.ledger for line in entry.get("from", ())]
        return sorted(learned + [tuple(entry["failed"][:3]) for entry in self.ledger if "failed" in entry])


def test_units_are_cut_from_epochs_and_the_last_one_is_shorter() -> None:
    cut = DataCut(batches_per_epoch=7, batches_per_unit=3, total_epochs=2)
    assert (cut.per_epoch, cut.total) == (3, 6)
    assert [cut.unit(number) for number in (0, 2, 3)] == [(0, 0, 3), (0, 6, 1), (1, 0, 3)]
    assert all(cut.number(*cut.unit(number)[:2]) == number for number in range(cut.total))


@given(st.permutations(range(12)))
def test_settled_units_are_remembered_in_any_order(order: list[int]) -> None:
    settled = SettledUnits()
    for done, number in enumerate(order, 1):
        assert number not in settled
        settled.add(number)
        assert sum(unit in settled for unit in range(12)) == done
        again = SettledUnits.of(settled.state_dict())
        assert list(again.open(12, 99)) == [unit for unit in range(12) if unit not in settled]
    assert settled.all_of(12)
    assert not settled.beyond


def test_a_round_closes_with_the_quorum_and_open_units_move_to_the_new_version() -> None:
    board = Board(made(quorum=3))
    for number, worker in ((4, "a"), (0, "b")):
        board.deliver(number, worker)
    assert board.coordinator.state.version == 0
    board.deliver(7, "a", value=4.0)
    assert board.coordinator.state.version == board.version == 1
    assert board.offered == set(range(10)) - {0, 4, 7}
    assert torch.equal(board.coordinator.learner.vector, torch.full((4,), -0.25 * 2.0))


def test_a_result_counts_by_its_samples() -> None:
    board = Board(made(quorum=2, cut=DataCut(batches_per_epoch=5, batches_per_unit=4, total_epochs=1)))
    board.deliver(0, value=1.0)
    board.deliver(1, value=6.0)
    assert torch.allclose(board.coordinator.learner.vector, torch.full((4,), -0.25 * (4 * 1.0 + 6.0) / 5))


def test_what_came_while_a_round_closed_is_in_the_next_one_and_counts_less() -> None:
    board = Board(made(quorum=2))
    board.deliver(0)
    board.deliver(1)
    board.deliver(2, base=0)
    board.deliver(3)
    assert board.coordinator.state.version == 2
    assert [line[3] for line in board.ledger[1]["from"]] == [0.5, 1.0]


@given(st.data())
def test_every_epoch_is_whole_whatever_the_order_and_whoever_dies(data: st.DataObject) -> None:
    cut = DataCut(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)))
    board = Board(made(data.draw(st.integers(1, 5)), cut))
    for _ in range(400):
        if board.coordinator.finished:
            break
        open_now = sorted(board.offered - board.coordinator.replayed.settled.beyond)
        number = data.draw(st.sampled_from(open_now))
        what = data.draw(st.sampled_from(["deliver", "deliver", "deliver", "fail", "twice", "damaged", "crash"]))
        if what == "fail":
            board.fail(number)
        elif what == "damaged":
            board.deliver(number, frames=(b"no update",))
        elif what == "crash":
            _recover(board)
        else:
            board.deliver(number, data.draw(st.sampled_from("abc")))
            if what == "twice":
                board.deliver(number)
    assert board.coordinator.finished
    expected = sorted(tuple(cut.unit(number)) for number in range(cut.total))
    assert board.spans() == expected
    assert board.coordinator.state.batches + sum(e["failed"][2] for e in board.ledger if "failed" in e) == sum(u[2] for u in expected)


def _recover(board: Board) -> None:
    """A new coordinator takes the same records again, and stands where the old one stood."""
    old = board.coordinator
    fresh = believing(Coordinator(old.plan, old.policies, Numbers()))
    for record, frames in board.records:
        fresh.replayed.apply(record, frames)
    for name in ("version", "batches", "samples", "sequences"):
        assert getattr(fresh.state, name) == getattr(old.state, name)
    assert fresh.replayed.settled == old.replayed.settled
    assert torch.equal(fresh.learner.vector, old.learner.vector)
    board.coordinator = fresh
    board.carry_out(fresh.handle(ServingStarted(), board.now))


def test_a_run_without_any_unit_left_ends_though_too_few_workers_came_for_the_rule() -> None:
    updates = Updates(aggregation=Krum(byzantine=0))
    board = Board(made(quorum=3, cut=DataCut(4, 1, 1), needed=3, updates=updates))
    for number in range(4):
        board.deliver(number, "only")
    assert board.coordinator.state.version == 0
    assert board.coordinator.finished
    assert len(board.coordinator.handle(RunConcluded(), board.now)) == 1


def test_a_worker_with_many_units_is_one_voice_under_a_rule_that_compares() -> None:
    updates = Updates(aggregation=Krum(byzantine=0))
    board = Board(made(quorum=5, cut=DataCut(20, 1, 1), needed=3, updates=updates))
    for number, (worker, value) in enumerate([("evil", 100.0), ("evil", 100.0), ("evil", 100.0), ("a", 1.0), ("b", 1.0)]):
        board.deliver(number, worker, value)
    assert board.coordinator.state.version == 1
    assert torch.equal(board.coordinator.learner.vector, torch.full((4,), -0.25))


def test_workers_cannot_pass_themselves_off_as_the_keeper_of_leases() -> None:
    header = {"kind": "failed", "epoch": 0, "start": 0, "batches": 1, "reason": "x"}
    assert isinstance(parse_from_leases(header), Failed)
    with pytest.raises(BadMessage):
        parse(header)
    with pytest.raises(BadMessage):
        parse_from_leases(header | {"start": -1})


def test_more_units_are_given_out_while_a_rule_waits_for_results_of_more_workers() -> None:
    updates = Updates(aggregation=Krum(byzantine=0))
    board = Board(made(quorum=3, cut=DataCut(1000, 1, 1), needed=3, updates=updates))
    done = 0
    for _ in range(100):
        number = min(board.offered)
        board.deliver(number, "ab"[number % 2])
        done += 1
    assert board.coordinator.state.version == 0
    assert board.notes == ["krum needs results of 3 workers, and 2 have handed in: waiting for 1 more"]
    board.deliver(min(board.offered), "c")
    assert board.coordinator.state.version == 1
    assert len(board.spans()) == done + 1


def test_or_the_run_stops_where_that_is_wanted() -> None:
    updates = Updates(aggregation=Krum(byzantine=0), below_quorum="stop")
    board = Board(made(quorum=3, cut=DataCut(1000, 1, 1), needed=3, updates=updates))
    for worker in "abc":
        board.deliver(min(board.offered), worker)
    assert board.coordinator.state.version == 1
    while board.offered and not board.coordinator.finished:
        board.deliver(min(board.offered), "a")
    assert (
        board.coordinator.completion.stopped
        == "krum needs results of 3 workers, and 1 have handed in: stopped, as updates.below_quorum says"
    )


# --- results of older versions ----------------------------------------------------------------------------


class Class(Cluster):
    """A coordinator that leases units of one batch itself, and workers that hold one each."""

    def __init__(self, workers: int, quorum: int, most_lag: int | None, units: int = 1000) -> None:
        strategy = strategy_of(WorkUnits(batches_per_unit=1, units_per_update=quorum, max_lag=most_lag))
        super().__init__(strategy)
        cut = DataCut(units, 1, 1)
        self.plan = self.plan._replace(cut=cut, lease_s=300.0, attempts=3, most_lag=most_lag, total_batches=units, batches_per_step=quorum)
        self.coordinator = believing(Coordinator(self.plan, strategy, self.learner))
        self.carry_out(self.coordinator.handle(ServingStarted(), self.now))
        self.workers = [self.join(f"w{number}") for number in range(workers)]
        self.units: dict[str, LeasedUnit] = {}
        for worker in self.workers:
            self.claim(worker)

    def claim(self, worker: FakeWorker) -> None:
        worker.protocol.claim()
        call = self.say(worker)
        events = worker.protocol.on_answer(self.answers[call], self.frames[call])
        self.units[worker.name] = next(event for event in events if isinstance(event, LeasedUnit))

    def hand_in(self, worker: FakeWorker) -> str | None:
        """The worker's unit is done; the status of its result."""
        unit = self.units.pop(worker.name)
        made = contribution(unit.epoch, unit.start + unit.batches, unit.version, unit=unit.number)
        worker.protocol.contribute(made, encoded(*[1.0] * 4), pulls=False)
        call = self.say(worker)
        self.hear(worker, call)
        return self.status(call)

    def shares(self) -> list[list[float]]:
        return [[line[3] for line in entry["from"]] for entry in self.ledger if "version" in entry]


def test_a_unit_that_is_computed_when_its_version_closes_counts_less_later() -> None:
    room = Class(3, 2, None)
    a, b, c = room.workers
    held = room.units["w2"].number
    assert [room.hand_in(a), room.hand_in(b)] == ["accepted"] * 2
    assert room.coordinator.state.version == 1
    for worker in (a, b):
        room.claim(worker)
    assert held not in (room.units["w0"].number, room.units["w1"].number), "only pending units are issued again"
    assert [room.hand_in(c), room.hand_in(a)] == ["accepted"] * 2
    assert room.shares() == [[1.0, 1.0], [1.0, 0.5]]
    again = Coordinator(room.plan, room.strategy, Numbers())
    for record, frames in room.records:
        again.replayed.apply(record, frames)
    assert torch.equal(again.learner.vector, room.learner.vector), "the journal gives the same weights, bit for bit"


@pytest.mark.parametrize(("most_lag", "workers", "allowed"), [(None, 2, 8), (None, 5, 20), (0, 3, 0), (1, 3, 1), (7, 2, 7)])
def test_a_result_may_lag_as_much_as_the_setting_or_the_number_of_workers_says(most_lag: int | None, workers: int, allowed: int) -> None:
    for lag, expected in ((allowed, "accepted"), (allowed + 1, "cancelled")):
        room = Class(workers, 1, most_lag)
        slow, quick = room.workers[:2]
        held = room.units[slow.name].number
        for _ in range(lag):
            assert room.hand_in(quick) == "accepted"
            room.claim(quick)
        oldest = room.beat(slow)["oldest"]
        assert (oldest <= 0) == (expected == "accepted"), "a worker hears when its unit has become too old"
        assert room.hand_in(slow) == expected
        assert (held in room.coordinator.replayed.settled) == (expected == "accepted"), "a dropped unit is done again"


def test_the_largest_lag_follows_the_workers_that_come_and_go() -> None:
    room = Class(6, 1, None)
    slow, quick, *others = room.workers
    for worker in others:
        room.leave(worker)
    for _ in range(9):
        room.hand_in(quick)
        room.claim(quick)
    assert room.hand_in(slow) == "cancelled"


def test_a_worker_cannot_claim_a_newer_version_than_that_of_its_lease() -> None:
    room = Class(2, 1, None)
    late, quick = room.workers
    room.hand_in(quick)
    room.pull(late)
    room.units[late.name] = room.units[late.name]._replace(version=1)
    assert room.hand_in(late) == "late"


def test_workers_with_units_of_older_versions_leave_units_for_all_others() -> None:
    room = Class(60, 1, None)
    assert room.hand_in(room.workers[0]) == "accepted"
    for number in range(60):
        room.claim(room.join(f"new{number}"))
    assert len({unit.number for unit in room.units.values()}) == len(room.units) == 119
