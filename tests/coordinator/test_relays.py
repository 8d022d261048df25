"""Relays on the virtual clock: a coordinator that is a worker of another, and what a kill between their two confirmations leaves."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config.schema.updates import Codec, Int4Codec, NoCodec, Updates
from shoal.coordinator import Coordinator
from shoal.coordinator.audit.files import gather
from shoal.coordinator.audit.run import missing_above
from shoal.coordinator.driver import CoordinatorDriver, DriverDeps, SnapshotContent
from shoal.coordinator.events import UpstreamAnswered, UpstreamState
from shoal.coordinator.round_policies import WholeBlock
from shoal.coordinator.run_plan import DataTask, RelayPlace, RunPlan, TaskPlan
from shoal.protocol.messages import PROTOCOL, Message, header_of
from shoal.runs.folder.file_store import FileStore
from shoal.updates import codecs
from shoal.worker.receipts import ReceiptsFile
from shoal.worker.relay import UpstreamSession
from shoal.worker.session import WorkerSession
from tests.coordinator.test_driver import STRATEGIES, Walker, Wire, World, violations
from tests.support.small_cluster import RATE, Numbers, believing, contribution, nameplate

ROUNDS = 16


def relayed_plan(above: TaskPlan) -> TaskPlan:
    return TaskPlan((DataTask("the relay's task", 0, 0),), None, above.grain, above.match, {})


def gradient(name: str, position: int) -> Tensor:
    return torch.randn(2, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {position}".encode())))


def weight(name: str) -> float:
    return 1.0 + zlib.crc32(name.encode()) % 3


class Learner(Walker):
    """A worker whose gradients tell whose they are, and from which batch."""

    residual: Tensor | None = None

    def compute(self) -> None:
        codec = self.world.updates.codec
        if self.residual is None:
            self.residual = codecs.residual_for(codec, 2)
        self.place = (self.place[0], self.place[1] + 1)
        frames = codecs.encode(codec, gradient(self.protocol.name, self.place[1]), self.residual)
        made = contribution(*self.place, self.protocol.have, weight=weight(self.protocol.name))
        self.protocol.contribute(made, frames, pulls=True)
        self.speak()


class Taker(Numbers):
    """What comes from above are a relay's weights."""

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        self.vector.copy_(update)
        return {}


class Relay:
    """A relay in the world of the coordinator above. It is killed as soon as `dies` is true of what it has just done."""

    def __init__(self, above: World, name: str, seat: int, strategy: str, dies: str = "", workers: int = 2) -> None:
        self.above, self.name, self.seat, self.strategy, self.updates = above, name, seat, STRATEGIES[strategy], above.updates
        self.expected, self.tasks = workers, None if above.plan.tasks is None else relayed_plan(above.plan.tasks)
        if self.tasks is not None:
            self.strategy = replace(self.strategy, rounds=WholeBlock(deadline_s=20.0))
        self.plan: Any = SimpleNamespace(tasks=self.tasks)
        self.folder, self.random, self.at, self.wire, self.dies = above.folder / name, above.random, above.at, Wire(), dies
        self.life, self.deaths = 0, 0
        self.driver: CoordinatorDriver | None = None
        self._connect()
        self.at(0.0, self.tick)
        self.workers = [Learner(self, f"{name}-{number}", 1.0 + number) for number in range(workers)]

    @property
    def now(self) -> float:
        return self.above.now

    def published(self, version: Any, replaying: bool) -> None: ...
    def say(self, text: str) -> None: ...

    def _connect(self) -> None:
        self.protocol = WorkerSession(self.name, {}, PROTOCOL, f"life {self.life}", 1e9, nameplate(self.name), workers=self.expected)
        self.protocol.ready = True
        self.climber = UpstreamSession(
            self.protocol, 2, 0, ReceiptsFile(self.above.folder / "workers" / f"{self.name}.jsonl"), self.updates.codec
        )
        self.asked = 0
        self.at(0.0, lambda life=self.life: self.speak(life))

    def begin(self, resume: bool) -> None:
        learner, store = Taker(2), FileStore(self.folder / "coordinator")
        place, expected = RelayPlace(self.seat, 3, 7), self.expected
        plan = RunPlan(
            self.updates, 0, expected, 1, 2**31, None, expected, 5.0, 0.5, receipt_key=store.receipt_key, above=place, tasks=self.tasks
        )
        coordinator = believing(Coordinator(plan, self.strategy, learner))

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
            threads=False,
        )
        self.driver = CoordinatorDriver(coordinator, around)
        if resume:
            snapshot = store.snapshots.newest(pytest.fail)
            assert snapshot is not None
            learner.vector.copy_(snapshot.weights["vector"])
            self.driver.recover(snapshot)
        else:
            learner.vector.copy_(self.climber.weights)
            coordinator.begin_below(self.upstream(begun_at=0))
        self.driver.open()

    def upstream(self, begun_at: int) -> UpstreamState:
        climber = self.climber
        return UpstreamState(self.name, climber.version, climber.step, climber.inner_steps, self.protocol.seq, begun_at, climber.task)

    def tick(self) -> None:
        if self.driver is not None:
            self.driver.step(0.0)
            self.look()
        self.at(0.1, self.tick)

    def look(self) -> None:
        assert self.driver is not None
        upward = self.driver.coordinator.replayed.relayed
        if upward is None or self.climber.version < 0:
            return
        if self.dies == "combined" and self.deaths < 3 and upward.asked.seq % 5 == 2:
            self.crash()
        elif self.climber.offer(upward.asked, upward.frames):
            self.speak(self.life)

    def under_way(self) -> dict[int, list[bytes]]:
        """What a round made, under its number above."""
        assert self.driver is not None
        upward = self.driver.coordinator.replayed.relayed
        return {} if upward is None else {upward.asked.seq: [bytes(frame) for frame in upward.frames]}

    def crash(self) -> None:
        assert self.driver is not None
        before = self.under_way()
        self.driver.store.journal.close()
        self.driver.store.ledger.close()
        self.wire.waiting.clear()
        self.wire.answers.clear()
        self.life, self.deaths = self.life + 1, self.deaths + 1
        if self.dies == "snapshot":
            self.dies = "sent"
        self.begin(resume=True)
        assert self.under_way() == before, "it says the same again, to the bit"
        self._connect()

    def speak(self, life: int) -> None:
        if life != self.life:
            return
        question = self.protocol.next_request(self.now)
        if question is None:
            return
        self.asked += 1
        number = self.asked
        message = Message(header_of(question.asked), tuple(bytes(frame) for frame in question.frames))
        self.above.wire.ask(message, lambda answer: self.hear(life, number, answer))
        self.at(question.timeout_s, lambda: self.give_up(life, number))
        if self.dies and message.header["kind"] == "contribute" and message.frames and self.deaths < 3 and message.header["seq"] % 5 == 2:
            if self.dies == "snapshot":
                assert self.driver is not None
                self.driver.snapshot()
            self.at(0.05 if self.deaths % 2 else 0.3, self.crash)  # before, or after, the coordinator above has taken it

    def give_up(self, life: int, number: int) -> None:
        if life == self.life and number == self.asked:
            self.at(self.protocol.on_no_answer(self.now, "silence").pause_s, lambda: self.speak(life))

    def hear(self, life: int, number: int, message: Message) -> None:
        if life != self.life or number != self.asked:
            return
        self.asked += 1
        answered = self.climber.on_events(self.protocol.on_answer(message.header, message.frames))
        if self.driver is None and self.climber.version >= 0:
            self.begin(resume=False)
        if answered is not None:
            assert self.driver is not None
            upstream = self.upstream(self.driver.coordinator.state.upstream["begun_at"])
            self.driver.handle(UpstreamAnswered(upstream, answered.status, answered.frames, self.protocol.done))
        self.at(0.01, lambda: self.speak(life))


def tree(folder: Path, strategy: str, dies: str = "", above: str = "", codec: Codec | None = None) -> tuple[World, list[Relay]]:
    """Two relays with two workers each, and a worker without a relay. `above`: the strategy there; empty: the same."""
    steps = ROUNDS if above in ("", strategy) else 4 * ROUNDS  # there, a version is made of fewer contributions
    world = World(folder, STRATEGIES[above or strategy], 1, steps, Updates(codec=codec or NoCodec()))
    relays = [Relay(world, "left", 0, strategy, dies), Relay(world, "right", 1, strategy)]
    Learner(world, "own", 1.5)
    world.run()
    for relay in relays:
        assert relay.driver is not None
        relay.driver.snapshot()
        relay.driver.close()
    return world, relays


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "coordinator" / "ledger.jsonl").read_text().splitlines()]


def own_violations(relay: Relay) -> list[str]:
    site: Any = SimpleNamespace(folder=relay.folder, strategy=relay.strategy)
    return violations(site)


def told_above(world: World, relay: Relay) -> list[str]:
    found: list[str] = []
    above, below = gather(world.folder / "coordinator", [], found), gather(relay.folder / "coordinator", [], found)
    return [*found, *missing_above(above, below)]


@pytest.mark.parametrize(
    ("strategy", "dies", "above"),
    [
        ("diloco", "", "diloco"),
        ("syncps", "combined", "syncps"),
        ("syncps", "sent", "syncps"),
        ("diloco", "sent", "diloco"),
        ("syncps", "snapshot", "syncps"),
        ("syncps", "sent", "async"),
        ("syncps", "snapshot", "edp"),
    ],
)
def test_what_a_relay_confirmed_is_above_once_wherever_it_was_killed(tmp_path: Path, strategy: str, dies: str, above: str) -> None:
    world, relays = tree(tmp_path, strategy, dies, above)
    assert (relays[0].deaths >= 3) == bool(dies)
    assert violations(world) == []
    for relay in relays:
        assert own_violations(relay) == []
        assert told_above(world, relay) == []
        passed_on = [line["upstream"][2] for line in lines(relay.folder) if "upstream" in line]
        assert passed_on.count("accepted") > ROUNDS // 3


def test_an_audit_names_what_a_relay_passed_on_and_the_ledger_above_lacks(tmp_path: Path) -> None:
    world, relays = tree(tmp_path, "syncps")
    ledger = tmp_path / "coordinator" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    assert any("of left" in one and "is nowhere above" in one for one in told_above(world, relays[0]))


def test_a_tree_of_synchronous_rounds_is_one_large_round(tmp_path: Path) -> None:
    world, relays = tree(tmp_path, "syncps")
    names = ["own", "left-0", "left-1", "right-0", "right-1"]
    expected = torch.zeros(2, dtype=torch.float64)
    for position in range(1, ROUNDS + 1):
        shares = torch.tensor([weight(name) for name in names], dtype=torch.float64)
        stack = torch.stack([gradient(name, position).double() for name in names])
        expected -= RATE * (shares @ stack) / shares.sum()
    found = world.driver.coordinator.learner.vector.double()
    assert torch.allclose(found, expected, atol=1e-5)
    for relay in relays:
        assert relay.driver is not None
        assert torch.equal(relay.driver.coordinator.learner.vector, world.driver.coordinator.learner.vector)


@pytest.mark.parametrize("dies", ["", "combined", "snapshot"])
def test_what_a_codec_leaves_at_a_relay_goes_up_with_its_next_round(tmp_path: Path, dies: str) -> None:
    """With four bits a single update is off by up to a fifteenth. What all of them made together is not off by more than one of them."""
    (exact, _), (short, relays) = (tree(tmp_path / name, "syncps", dies, "", codec) for name, codec in (("a", None), ("b", Int4Codec())))
    assert lines(exact.folder) == lines(short.folder), "the same happened in both"
    found, expected = (world.driver.coordinator.learner.vector for world in (short, exact))
    assert not torch.equal(found, expected)
    assert torch.allclose(found, expected, atol=3 * RATE / 15)
    for relay in relays:
        assert own_violations(relay) == []
        assert told_above(short, relay) == []


@pytest.mark.parametrize("dies", ["", "sent"])
def test_a_relay_may_have_relays_below_it(tmp_path: Path, dies: str) -> None:
    """A tree of three levels: what the lowest confirmed is in the weights above once, though the relay between them is killed."""
    world = World(tmp_path, STRATEGIES["syncps"], 1, ROUNDS)
    middle = Relay(world, "middle", 0, "syncps", dies)
    lowest: Any = Relay(middle, "lowest", 0, "syncps")  # type: ignore[arg-type]  # it asks of what is above only what a relay has, too
    Learner(world, "own", 1.5)
    world.run()
    assert (middle.deaths >= 3) == bool(dies)
    for relay in (lowest, middle):
        relay.driver.snapshot()
        relay.driver.close()
        assert own_violations(relay) == []
    assert violations(world) == []
    assert told_above(world, middle) == []
    assert told_above(middle, lowest) == []  # type: ignore[arg-type]
    assert sum(len(line["from"]) for line in lines(lowest.folder) if "from" in line) > ROUNDS
