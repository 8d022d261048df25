"""A world in which everything goes wrong: messages are lost, doubled and reordered, workers die, the coordinator dies, clocks jump.

Workers behave as ours do: one message at a time, again until it is answered, join again when they are not known. What a contribution says
follows from the batches it was made of, so the ledger alone tells what the weights must be.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tiny_cluster import RATE, Numbers

from shoal.config.schema.updates import Updates
from shoal.coordinator import Barrier, Coordinator, Policy
from shoal.coordinator.effects import Effect, Entry, Persist, Reply
from shoal.coordinator.machine import LONGEST_WAIT_S, Called, Plan, Tick
from shoal.updates import codecs
from shoal.updates.messages import PROTOCOL, Asked, Contribute, Heartbeat, Join, Leave, Pull

SIZE = 2
LONGEST = 12
"""Batches in an epoch."""


def value_of(seat: int, epoch: int, position: int) -> float:
    return 1.0 + ((seat * 31 + epoch * 17 + position * 7) % 64) / 8


class Letter(NamedTuple):
    """A message on its way."""

    sender: Traveller
    call: int
    asked: Asked
    frames: Any


@dataclass
class Traveller:
    """A worker, as far as the coordinator can tell."""

    name: str
    session: str = ""
    number: int = 0
    seq: int = 0
    version: int = -1
    round: int = 0
    seat: int = -1
    epoch: int = 0
    position: int = 0
    steps: int = 0
    under_way: Contribute | None = None
    value: float = 0.0
    asking: str = ""
    """What it waits for an answer to: join, pull, contribute, or nothing."""
    call: int = -1
    answer: tuple[dict[str, Any], Any] | None = None
    resend: bool = False
    """Its contribution was not taken: after the pull it goes out once more."""
    alive: bool = True
    seen: int = 0
    """The newest version it was told of."""


@dataclass
class Disk:
    """What is left after a crash."""

    snapshot: dict[str, Any] = field(default_factory=dict)
    journal: list[tuple[dict[str, Any], tuple[bytes, ...]]] = field(default_factory=list)
    ledger: list[dict[str, Any]] = field(default_factory=list)


class World:
    """The coordinator, its disk, its workers, and the weather."""

    def __init__(self, policy: Policy, plan: Plan, workers: int, updates: Updates) -> None:
        self.policy, self.plan, self.updates = policy, plan, updates
        self.now, self.calls, self.pull_every = 50.0, 0, policy.pull_every
        self.disk = Disk()
        self.coordinator = Coordinator(plan, policy, Numbers(SIZE))
        self.snapshot()
        self.letters: list[Letter] = []
        self.callers: dict[int, Letter] = {}
        self.workers = [Traveller(f"w{number}") for number in range(workers)]
        self.confirmed: list[tuple[str, int]] = []
        self.crashes = 0
        self.open_since: dict[int, tuple[int, float]] = {}
        """When each round was first seen open, and in which life of the coordinator."""
        self.dies_after: int | None = None
        """Effects of the next event that are still carried out before the coordinator dies."""

    # --- the coordinator and its disk -----------------------------------------------------------------

    def event(self, event: Called | Tick) -> None:
        effects = self.coordinator.handle(event, self.now)
        until, self.dies_after = self.dies_after, None
        for effect in effects if until is None else effects[:until]:
            self.carry_out(effect)
        if until is not None:
            self.crash(whole=until >= len(effects))

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Persist):
            self.disk.journal.append((copy.deepcopy(effect.record), tuple(bytes(frame) for frame in effect.frames)))
        elif isinstance(effect, Entry):
            self.disk.ledger.append(copy.deepcopy(effect.line))
        elif isinstance(effect, Reply):
            letter = self.callers.pop(effect.caller, None)
            assert letter is not None, "nobody is answered twice"
            if letter.sender.call == letter.call and letter.sender.answer is None:
                letter.sender.answer = (copy.deepcopy(effect.header), effect.frames)

    def snapshot(self) -> None:
        coordinator = self.coordinator
        pending = [(copy.deepcopy(record), tuple(bytes(frame) for frame in frames)) for record, frames in coordinator.pending()]
        saved = copy.deepcopy(coordinator.state_dict()) | {"vector": coordinator.learner.vector.clone(), "ledger": len(self.disk.ledger)}
        self.disk.snapshot, self.disk.journal = saved, pending

    def crash(self, whole: bool = True) -> None:
        """The coordinator is gone, and comes back from what its disk holds."""
        before, self.crashes = self.coordinator, self.crashes + 1
        self.coordinator = Coordinator(self.plan, self.policy, Numbers(SIZE))
        self.coordinator.learner.vector.copy_(self.disk.snapshot["vector"])
        self.coordinator.load_state_dict(copy.deepcopy(self.disk.snapshot))
        lines = self.disk.ledger[: self.disk.snapshot["ledger"]]
        for record, frames in copy.deepcopy(self.disk.journal):
            lines += [effect.line for effect in self.coordinator.replay(record, frames) if isinstance(effect, Entry)]
        if whole:
            assert lines == self.disk.ledger
            self.check_same(before, self.coordinator)
        self.disk.ledger = lines
        self.callers.clear()

    def check_same(self, before: Coordinator, after: Coordinator) -> None:
        assert torch.equal(before.learner.vector, after.learner.vector), "the weights are the same to the bit"
        durable = ("accepted", "replaced")
        for name, value in vars(before.state).items():
            if name == "contributions":
                assert {key: value.get(key) for key in durable} == {key: after.state.contributions.get(key) for key in durable}
            else:
                assert value == getattr(after.state, name), name
        assert [record for record, _ in before.pending()] == [record for record, _ in after.pending()]

    # --- workers --------------------------------------------------------------------------------------

    def act(self, worker: Traveller) -> None:
        """Hear the answer that has come, or say what is to be said next."""
        if not worker.alive:
            worker.alive = True
        if worker.asking and worker.answer is None:
            return
        if worker.answer is not None:
            asking, (header, frames) = worker.asking, worker.answer
            worker.asking, worker.answer = "", None
            self.hear(worker, asking, header, frames)
        if not worker.asking:
            self.speak(worker)

    def speak(self, worker: Traveller) -> None:
        if not worker.session:
            self.send(worker, "join")
        elif worker.version < 0 or (worker.resend and worker.version == -1):
            self.send(worker, "pull")
        else:
            if worker.under_way is None:
                self.compute(worker)
            self.send(worker, "contribute")

    def compute(self, worker: Traveller) -> None:
        worker.position += 1
        if worker.position > LONGEST:
            worker.epoch, worker.position = worker.epoch + 1, 1
        worker.steps += 1
        worker.value = value_of(worker.seat, worker.epoch, worker.position)
        have = worker.version if worker.steps % self.pull_every == 0 else -1
        place = (worker.epoch, worker.position, 1)
        worker.under_way = Contribute("", 0, worker.seq, worker.version, worker.round, 1.0, 2, *place, have, {"loss": worker.value})
        worker.seq, worker.round = worker.seq + 1, worker.round + 1

    def send(self, worker: Traveller, asking: str, frames: bool = True) -> None:
        """Put a message on its way; an earlier one may still be."""
        self.calls += 1
        worker.number += 1
        worker.asking, worker.call, worker.answer = asking, self.calls, None
        asked: Asked
        content: Any = ()
        if asking == "join":
            asked = Join(worker.name, PROTOCOL, {})
        elif asking == "pull":
            asked = Pull(worker.session, worker.number, -1)
        else:
            assert worker.under_way is not None
            asked = worker.under_way._replace(session=worker.session, number=worker.number)
            content = codecs.encode(self.updates.codec, torch.full((SIZE,), worker.value), None) if frames else ()
        self.letters.append(Letter(worker, self.calls, asked, content))

    def hear(self, worker: Traveller, asking: str, header: dict[str, Any], frames: Any) -> None:
        if header["kind"] == "refused":
            assert header["reason"] in ("unknown-session", "replayed", "asked-again"), header
            if header["reason"] == "unknown-session":
                worker.session = ""
            return
        assert header["version"] >= worker.seen, "versions never go back, whatever crashed"
        worker.seen = header["version"]
        if asking == "join":
            self.welcome(worker, header)
        elif asking == "pull":
            worker.version = worker.round = header["version"]
            worker.resend = False
        else:
            self.receipt(worker, header)

    def welcome(self, worker: Traveller, header: dict[str, Any]) -> None:
        worker.session = header["session"]
        place, sent = (header["epoch"], header["position"]), worker.under_way
        taken = sent is not None and sent.seq == header["last_seq"]
        here = (sent.epoch, sent.position - 1) if sent is not None and not taken else (worker.epoch, worker.position)
        moved = worker.seat != header["seat"] or place > here
        worker.seq = max(worker.seq, header["last_seq"] + 1)
        if moved:
            worker.seat, worker.epoch, worker.position = header["seat"], *place
        if worker.under_way is not None and not taken:
            worker.version, worker.resend = -1, True
            if moved:
                worker.under_way = None
        elif worker.under_way is None:
            worker.version = -1

    def receipt(self, worker: Traveller, header: dict[str, Any]) -> None:
        sent, status = worker.under_way, header["status"]
        assert sent is not None
        if status == "wait":
            self.send(worker, "contribute", frames=False)
            return
        assert status in ("accepted", "late", "stale", "finished"), f"an honest worker is told {status}"
        worker.under_way = None
        if status == "accepted":
            self.confirmed.append((worker.name, sent.seq))
        worker.round = max(sent.round + (status == "accepted"), header["round"])
        if "weights" in header:
            worker.version = header["version"]

    # --- what happens ---------------------------------------------------------------------------------

    def deliver(self, letter: Letter, keep: bool = False) -> None:
        if not keep:
            self.letters.remove(letter)
        self.calls += 1
        self.callers[self.calls] = letter
        self.event(Called(self.calls, letter.asked, letter.frames, f"session-{self.calls}"))

    def die(self, worker: Traveller) -> None:
        """The process ends; one of the same name knows nothing of it."""
        index = self.workers.index(worker)
        self.workers[index] = Traveller(worker.name, number=worker.number)

    def leave(self, worker: Traveller) -> None:
        if worker.session and not worker.asking:
            self.calls += 1
            worker.number += 1
            self.letters.append(Letter(worker, self.calls, Leave(worker.session, worker.number), ()))
            worker.session, worker.version = "", -1

    def beat(self) -> None:
        for worker in self.workers:
            if worker.session:
                worker.number += 1
                self.calls += 1
                letter = Letter(worker, self.calls, Heartbeat(worker.session, worker.number, "waiting"), ())
                self.callers[self.calls] = letter
                self.event(Called(self.calls, letter.asked, ()))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.event(Tick())
        self.check_patience()

    def check_patience(self) -> None:
        """Nobody is held back long without a word; no round but the first, which waits for all to start, is open beyond its deadline."""
        now, version, rounds = self.coordinator.now, self.coordinator.state.version, self.policy.rounds
        assert all(now - waited.since < LONGEST_WAIT_S for waited in self.coordinator.waiting.values())
        if isinstance(rounds, Barrier) and version > 0 and version in self.coordinator.rounds.open and not self.coordinator.finished:
            life, since = self.open_since.get(version, (self.crashes, now))
            self.open_since[version] = (self.crashes, since if life == self.crashes else now)
            assert now - self.open_since[version][1] < rounds.deadline_s

    def happen(self, kind: str, number: int) -> None:
        """One thing, right or wrong."""
        worker = self.workers[number % len(self.workers)]
        letter = self.letters[number % len(self.letters)] if self.letters else None
        if kind == "act":
            self.act(worker)
        elif kind == "go":  # all is well for once
            self.act(worker)
            for own in [one for one in self.letters if one.sender is worker and one.call == worker.call]:
                self.deliver(own)
        elif kind == "deliver" and letter:
            self.deliver(letter)
        elif kind == "double" and letter:
            self.deliver(letter, keep=True)
        elif kind == "lose" and letter:
            self.letters.remove(letter)
        elif kind == "again" and worker.asking:  # no answer came in time
            self.send(worker, worker.asking)
        elif kind == "die":
            self.die(worker)
        elif kind == "leave":
            self.leave(worker)
        elif kind == "crash":
            self.dies_after = number
        elif kind == "snapshot":
            self.snapshot()
        elif kind == "time":
            self.pass_time((0.1, 1.0, 4.0, 6.0, 11.0, 40.0, -30.0)[number % 7])

    def calm_down(self) -> None:
        """The weather clears. Everybody must get somewhere, or hear that it is over; one may be gone for good."""
        if len(self.workers) > 2 and len(self.letters) % 2:
            del self.workers[0]
        self.letters.clear()
        self.dies_after = None
        for worker in self.workers:
            worker.number += 1000
            if worker.asking:
                self.send(worker, worker.asking)
        goal = {worker.name: len([one for one in self.confirmed if one[0] == worker.name]) + 2 for worker in self.workers}
        for _ in range(200):
            for worker in self.workers:
                self.act(worker)
                for letter in [one for one in self.letters if one.sender is worker]:
                    self.deliver(letter)
            self.beat()
            self.pass_time(1.0)
            counts = {worker.name: len([one for one in self.confirmed if one[0] == worker.name]) for worker in self.workers}
            if self.coordinator.finished or all(counts[name] >= goal[name] for name in goal):
                break
        else:
            raise AssertionError(f"somebody waits for ever: {counts} of {goal}")

    def settle(self) -> None:
        """Answers that are still held back come, when time passes."""
        for _ in range(60):
            self.pass_time(1.0)
        assert not self.coordinator.waiting
        assert not self.callers, "every question is answered"
        for worker in self.workers:
            if worker.asking == "contribute" and worker.answer is not None and worker.answer[0].get("status") == "accepted":
                assert worker.under_way is not None
                self.confirmed.append((worker.name, worker.under_way.seq))

    # --- what must hold -------------------------------------------------------------------------------

    def check(self) -> None:
        applied, others, batches = [], [], []
        weights = torch.zeros(SIZE, dtype=torch.float64)
        version = 0
        for line in self.disk.ledger:
            if "version" in line:
                version += 1
                assert line["version"] == version, "versions count up by one"
                weights -= RATE * sum(one[3] * value_of(*one[5:8]) for one in line["from"]) / len(line["from"])
                applied += line["from"]
            else:
                others += [line["replaced"]] if "replaced" in line else line["unused"]
        assert version == self.coordinator.state.version
        waiting = [(record["worker"], record["seq"]) for record, _ in self.coordinator.pending()]
        known = [(one[0], one[1]) for one in applied + others] + waiting
        assert len(known) == len(set(known)), "nothing is counted twice"
        assert set(self.confirmed) <= set(known), "what was confirmed is in the weights, or it is said why not"
        batches = [tuple(one[5:8]) for one in applied + others]
        assert len(batches) == len(set(batches)), "nobody learns twice from the same batch of a seat"
        assert torch.allclose(self.coordinator.learner.vector.double(), weights, rtol=1e-4, atol=1e-3)
