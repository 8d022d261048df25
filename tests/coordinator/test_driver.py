"""The driver on a virtual clock: the real coordinator, the real protocol and the real store, with no thread and no waiting."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.schema.strategy import Async, DiLoCo, Edp, SyncPs, WorkUnits
from shoal.config.schema.updates import NoCodec, Updates
from shoal.coordinator import Coordinator
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import audit
from shoal.coordinator.driver import CoordinatorDriver, DriverDeps, SnapshotContent
from shoal.coordinator.effects import Published
from shoal.coordinator.events import WorkerExited
from shoal.coordinator.run_plan import RunPlan
from shoal.coordinator.units.cut import DataCut
from shoal.protocol.messages import PROTOCOL, Message, Request, SeatAssigned, header_of
from shoal.runs.folder.file_store import FileStore
from shoal.strategies import Policies
from shoal.transports import Traffic
from shoal.updates import codecs
from shoal.worker.receipts import ReceiptsFile
from shoal.worker.session import ContributionReceipt, LeasedUnit, WorkerSession
from tests.support.small_cluster import Numbers, believing, contribution, nameplate, strategy_of

STRATEGIES = {
    "syncps": strategy_of(SyncPs(round_timeout_s=5.0)),
    "edp": strategy_of(Edp(pull_every_steps=2)),
    "async": strategy_of(Async(contributions_per_update=2), 3),
    "diloco": strategy_of(DiLoCo(inner_steps=1, quorum=2, grace_s=0.5), 3),
    "workunits": strategy_of(WorkUnits(batches_per_unit=2, units_per_update=2)),
}


class Wire:
    """A server whose peers are functions: what they ask lies here until it is polled."""

    def __init__(self) -> None:
        self.traffic, self.waiting, self.answers = Traffic(), list[Request](), dict[int, Callable[[Message], None]]()
        self._numbers = itertools.count()

    def ask(self, message: Message, answer: Callable[[Message], None]) -> None:
        number = next(self._numbers)
        self.answers[number] = answer
        self.waiting.append(Request(b"peer", number, message))

    def poll(self, timeout_s: float) -> list[Request]:
        found, self.waiting = self.waiting, []
        return found

    def reply(self, request: Request, message: Message) -> None:
        self.answers.pop(request.number)(message)

    def wake(self) -> None: ...
    def close(self) -> None: ...


class Board(Wire):
    """A server that takes weights and units for a database, and keeps none."""

    def is_from_leases(self, request: Request) -> bool:
        return False

    def iteration(self) -> None: ...
    def consume(self, request: Request) -> None: ...
    def issue(self, *units: Any) -> None: ...
    def publish(self, version: int, kind: str, header: dict[str, Any], frames: Any) -> None: ...
    def set_end(self, status: str | None) -> None: ...
    def keep_out(self, worker: str, out: bool) -> None: ...
    def has_open_units(self) -> bool:
        return False

    def notes(self) -> list[str]:
        return []

    def workers(self) -> list[dict[str, Any]]:
        return []

    def workers_here(self) -> int:
        return 0


class World:
    """Virtual time: a heap of things that happen, one after the other."""

    def __init__(
        self, folder: Path, strategy: Policies, seed: int, steps: int = 24, updates: Updates | None = None, board: Board | None = None
    ) -> None:
        self.updates, self.board = updates or Updates(), board
        self.folder, self.strategy, self.random = folder, strategy, random.Random(seed)
        self.now, self.heap, self._order = 0.0, list[tuple[float, int, Callable[[], None]]](), itertools.count()
        self.wire, self.versions, self.published_at = board or Wire(), list[int](), [0.0]
        self.plan = RunPlan(self.updates, 0, 3, 1, steps, None, 24, 5.0, 0.5)
        if strategy.feed.leased:  # eight epochs of six units, of which two make a version
            self.plan = self.plan._replace(
                cut=DataCut(12, 2, 8), total_batches=96, lease_s=30.0, attempts=3, most_lag=self.strategy.feed.most_lag
            )
        self.driver = self.begin(resume=False)
        self.at(0.0, self.tick)

    def begin(self, resume: bool) -> CoordinatorDriver:
        learner = Numbers(2)
        store = FileStore(self.folder / "coordinator")
        coordinator = believing(Coordinator(self.plan._replace(receipt_key=store.receipt_key), self.strategy, learner))

        def capture() -> SnapshotContent:
            return SnapshotContent(
                {"vector": learner.vector.clone()}, {"coordinator": coordinator.replayed.state_dict(), "ledger": store.ledger.length}
            )

        sessions = (f"{self.random.getrandbits(64):016x}" for _ in itertools.count())
        around = DriverDeps(
            self.wire,
            store,
            self.published,
            self.say,
            Message({"size": 2}),
            capture,
            lambda: self.now,
            lambda: next(sessions),
            self.board,
            threads=False,
        )
        driver = CoordinatorDriver(coordinator, around)
        if resume:
            snapshot = store.snapshots.newest(pytest.fail)
            assert snapshot is not None
            learner.vector.copy_(snapshot.weights["vector"])
            driver.recover(snapshot)
        driver.open()
        return driver

    def crash(self) -> None:
        """The coordinator is gone, with all that it had not written; those who waited for it hear nothing."""
        self.driver.store.journal.close()
        self.driver.store.ledger.close()
        self.wire.waiting.clear()
        self.wire.answers.clear()
        self.driver = self.begin(resume=True)

    def published(self, version: Published, replaying: bool) -> None:
        self.published_at.append(self.now)
        if not replaying:
            self.versions.append(version.version)

    def say(self, text: str) -> None: ...

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + delay_s, next(self._order), what))

    def tick(self) -> None:
        self.driver.step(0.0)
        self.at(0.1, self.tick)

    def run(self, until: float = 2000.0) -> None:
        while not self.driver.coordinator.finished:
            assert self.now < until, "it should have been over long ago"
            self.now, _, what = heapq.heappop(self.heap)
            what()
        for _ in range(200):  # all hear of it
            self.now, _, what = heapq.heappop(self.heap)
            what()
        self.driver.snapshot()
        self.driver.close()


class Walker:
    """A worker in virtual time: it speaks the protocol, and a step takes as long as it says."""

    def __init__(self, world: World, name: str, step_s: float) -> None:
        self.world, self.step_s = world, step_s
        self.protocol = WorkerSession(name, {}, PROTOCOL, "i", patience_s=1e9, identity=nameplate(name))
        self.protocol.ready = True
        self.receipts = ReceiptsFile(world.folder / "workers" / f"{name}.jsonl")
        self.place, self.unit, self.asked = (0, 0), None, 0
        world.at(0.0, self.speak)

    def speak(self) -> None:
        question = self.protocol.next_request(self.world.now)
        if question is None:
            return self.world.at(self.step_s * self.world.random.uniform(0.8, 1.2), self.compute) if not self.protocol.done else None
        self.asked += 1
        number = self.asked
        self.world.wire.ask(Message(header_of(question.asked), tuple(question.frames)), lambda message: self.hear(number, message))
        self.world.at(question.timeout_s, lambda: self.give_up(number))

    def give_up(self, number: int) -> None:
        if number == self.asked:
            self.world.at(self.protocol.on_no_answer(self.world.now, "silence").pause_s, self.speak)

    def hear(self, number: int, message: Message) -> None:
        if number != self.asked:
            return
        self.asked += 1
        for event in self.protocol.on_answer(message.header, message.frames):
            if isinstance(event, SeatAssigned):
                self.place = event[1:]
            elif isinstance(event, LeasedUnit):
                self.unit = event
            elif isinstance(event, ContributionReceipt):
                self.receipts.write(self.protocol.name, event)
        self.world.at(self.world.random.uniform(0.0, 0.05), self.speak)

    def compute(self) -> None:
        protocol, frames = self.protocol, codecs.encode(NoCodec(), torch.ones(2), None)
        if not self.world.strategy.feed.leased:
            self.place = (self.place[0], self.place[1] + 1)
            protocol.contribute(contribution(*self.place, protocol.have), frames, pulls=True)
        elif self.unit is not None:
            unit, self.unit = self.unit, None
            made = contribution(unit.epoch, unit.start + unit.batches, protocol.have, batches=unit.batches, unit=unit.number)
            protocol.contribute(made, frames, pulls=False)
        else:
            protocol.claim()
        self.speak()


def live(folder: Path, strategy: Policies, seed: int, *disasters: tuple[float, Callable[[World], None]]) -> World:
    world = World(folder, strategy, seed)
    for number in range(3):
        Walker(world, f"w{number}", 1.0 + number)
    for when, what in disasters:
        world.at(when, lambda what=what: what(world))
    world.run()
    return world


def ledger_of(folder: Path) -> str:
    return (folder / "coordinator" / "ledger.jsonl").read_text()


def violations(world: World) -> list[str]:
    found: list[str] = []
    evidence = gather(world.folder / "coordinator", (world.folder / "workers").glob("*.jsonl"), found)
    return audit(evidence, found, units=world.strategy.feed.leased).violations


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_takes_no_time_no_thread_and_gives_the_same_from_the_same_seed(tmp_path: Path, name: str) -> None:
    before = set(threading.enumerate())  # some of an earlier test's may end meanwhile
    first, again, other = (live(tmp_path / str(number), STRATEGIES[name], seed) for number, seed in enumerate((1, 1, 2)))
    assert set(threading.enumerate()) <= before
    assert first.versions == list(range(1, 25))
    assert ledger_of(first.folder) == ledger_of(again.folder)
    assert first.now == again.now
    assert first.now != other.now
    assert violations(first) == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_coordinator_that_dies_twice_loses_nothing_it_confirmed(tmp_path: Path, name: str) -> None:
    world = live(
        tmp_path, STRATEGIES[name], 3, (6.0, World.crash), (9.5, lambda world: world.driver.handle(WorkerExited("w2"))), (14.0, World.crash)
    )
    assert world.driver.coordinator.state.version == 24
    assert violations(world) == []


def snapshots_after_s(folder: Path, monkeypatch: pytest.MonkeyPatch, step_s: float) -> list[float]:
    """How long after a version was published each snapshot was written, in a run with weights in a database."""
    world = World(folder, STRATEGIES["workunits"], 1, board=Board())
    world.driver._long_journal = 2500  # some rounds; a round makes it less than half as long again
    write, after = world.driver.snapshots.write, list[float]()
    monkeypatch.setattr(world.driver.snapshots, "write", lambda *state: (after.append(world.now - world.published_at[-1]), write(*state)))
    for number in range(3):
        Walker(world, f"w{number}", step_s)
    while not world.driver.coordinator.finished:
        world.now, _, what = heapq.heappop(world.heap)
        what()
    world.driver.close()
    return after


def test_a_snapshot_waits_until_the_new_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after = snapshots_after_s(tmp_path / "seconds", monkeypatch, 2.0)
    assert after
    assert min(after) >= 0.3
    without_pause = snapshots_after_s(tmp_path / "always reading", monkeypatch, 0.01)
    assert without_pause
    assert max(without_pause) < 0.3


def dead_in_the_midst(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of workers that are taken for dead before the run is over; afterwards those of these tests say nothing more."""
    said: list[str] = []

    def say(world: World, text: str) -> None:
        if "is taken for dead" in text and not world.driver.coordinator.finished:
            said.append(text)

    monkeypatch.setattr(World, "say", say)
    return said


def test_nobody_is_taken_for_dead_because_the_coordinator_was_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = dead_in_the_midst(monkeypatch)

    def pause(world: World) -> None:
        """Everything on the machine stands still for a minute: what was due in between comes after it."""
        world.now += 60.0
        world.heap = [(when + 60.0, order, what) for when, order, what in world.heap]

    world = live(tmp_path, STRATEGIES["syncps"], 4, (6.0, pause), (80.0, pause))
    assert world.versions == list(range(1, 25))
    assert said == []


def test_who_died_while_the_coordinator_was_away_is_taken_for_dead_soon_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = dead_in_the_midst(monkeypatch)
    world = World(tmp_path, STRATEGIES["syncps"], 4)
    for name in ("w0", "w1"):
        Walker(world, name, 1.0)
    gone = Walker(world, "gone", 1.0)
    world.at(6.0, lambda: setattr(gone, "speak", lambda: None))
    world.at(7.0, lambda: setattr(world.driver, "_tick_at", world.now - 60.0))
    world.run()
    assert [text.partition(" ")[0] for text in said] == ["gone"]


def test_a_coordinator_that_is_always_slow_judges_all_the_same(tmp_path: Path) -> None:
    world, asked = World(tmp_path, STRATEGIES["async"], 1), list[Any]()
    Walker(world, "silent", 1.0)
    while not world.driver.coordinator.members.by_name:
        world.now, _, what = heapq.heappop(world.heap)
        what()
    world.wire.ask = lambda message, answer: asked.append(message)  # type: ignore[method-assign]
    for _ in range(6):
        world.now += 10.0  # between any two looks at what has come
        world.driver.step(0.0)
    assert not world.driver.coordinator.members.by_name


def test_a_question_that_no_worker_of_ours_asks_is_refused_and_counted(tmp_path: Path) -> None:
    world, heard = World(tmp_path, STRATEGIES["async"], 1), list[Any]()
    world.wire.ask(Message({"kind": "join", "name": 7}), heard.append)
    world.driver.step(0.0)
    assert heard[0].header["reason"] == "malformed"
    assert world.wire.traffic.refused == {"malformed": 1}
