"""A world in which everything goes wrong: messages are lost, doubled and reordered, workers die, the coordinator dies, its disk fails,
clocks jump.

Workers speak the real protocol, one question at a time. What a contribution says follows from the batches it was made of, so the ledger
alone tells what the weights must be.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shoal.coordinator import Coordinator
from shoal.coordinator.effects import Effect, LedgerEntry, Persist, Reply
from shoal.coordinator.events import Event, RequestReceived, RunConcluded, ServingStarted, Tick
from shoal.coordinator.rounds.contributions import LONGEST_WAIT_S
from shoal.coordinator.run_plan import RunPlan
from shoal.protocol.messages import PROTOCOL, Leave, SeatAssigned, WorkerRequest
from shoal.strategies import Policies
from shoal.updates import codecs
from shoal.updates.staleness import bound_for
from shoal.worker.session import ContributionReceipt, LeasedUnit, WorkerSession
from tests.support.small_cluster import RATE, Numbers, believing, contribution, nameplate

SIZE = 2
LONGEST = 12
"""Batches in an epoch."""


def value_of(seat: int, epoch: int, position: int) -> float:
    return 1.0 + ((seat * 31 + epoch * 17 + position * 7) % 64) / 8


class Letter(NamedTuple):
    """A message on its way."""

    sender: Traveller
    call: int
    asked: WorkerRequest
    frames: Any


class Traveller:
    """A worker: the protocol, a place at the data, and what has come for it."""

    def __init__(self, name: str, life: int = 0) -> None:
        self.name, self.life = name, life
        self.protocol = WorkerSession(name, {}, PROTOCOL, f"life {life}", patience_s=1e9, identity=nameplate(name))
        self.protocol.ready = True
        self.seat, self.epoch, self.position, self.steps = -1, 0, 0, 0
        self.unit: LeasedUnit | None = None
        self.call = -1
        """What it waits for an answer to; -1: nothing."""
        self.answer: tuple[dict[str, Any], Any] | None = None
        self.seen = 0
        """The newest version it was told of."""


@dataclass
class Disk:
    """What is left after a crash."""

    snapshot: dict[str, Any] = field(default_factory=dict)
    journal: list[tuple[dict[str, Any], tuple[bytes, ...]]] = field(default_factory=list)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    before: tuple[dict[str, Any], list[tuple[dict[str, Any], tuple[bytes, ...]]]] | None = None
    """The snapshot before the newest, and the journal from it to the newest one; None: there is none, or it was needed already."""


class World:
    """The coordinator, its disk, its workers, and the weather."""

    def __init__(self, strategy: Policies, plan: RunPlan, workers: int) -> None:
        self.strategy, self.plan = strategy, plan
        self.now, self.calls = 50.0, 0
        self.disk = Disk()
        self.letters: list[Letter] = []
        self.callers: dict[int, Letter] = {}
        self.workers, self.most_workers = [Traveller(f"w{number}") for number in range(workers)], workers
        self.confirmed: list[tuple[str, int]] = []
        self.crashes = 0
        self.open_since: dict[int, tuple[int, float]] = {}
        """When each round was first seen open, and in which life of the coordinator."""
        self.dies_after: int | None = None
        """Effects of the next event that are still carried out before the coordinator dies."""
        self.full_for = 0
        """Events whose records the disk will not take."""
        self.coordinator = believing(Coordinator(plan, strategy, Numbers(SIZE)))
        self.event(ServingStarted())
        self.snapshot()

    # --- the coordinator and its disk -----------------------------------------------------------------

    def event(self, event: Event) -> None:
        effects = self.coordinator.handle(event, self.now)
        until, self.dies_after = self.dies_after, None
        if self.full_for and until is None and any(isinstance(effect, Persist) for effect in effects):
            self.full_for -= 1
            until = next(number for number, effect in enumerate(effects) if isinstance(effect, Persist))
        for effect in effects if until is None else effects[:until]:
            self.carry_out(effect)
        if until is not None:
            self.crash(whole=until >= len(effects))

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Persist):
            self.disk.journal.append((copy.deepcopy(effect.record), tuple(bytes(frame) for frame in effect.frames)))
        elif isinstance(effect, LedgerEntry):
            self.disk.ledger.append(copy.deepcopy(effect.line))
        elif isinstance(effect, Reply):
            letter = self.callers.pop(effect.caller, None)
            assert letter is not None, "a request is answered once"
            if letter.sender.call == letter.call and letter.sender.answer is None:
                letter.sender.answer = (copy.deepcopy(effect.header), effect.frames)

    def snapshot(self) -> None:
        coordinator, disk = self.coordinator, self.disk
        saved = copy.deepcopy(coordinator.replayed.state_dict()) | {
            "vector": coordinator.learner.vector.clone(),
            "ledger": len(disk.ledger),
        }
        if disk.snapshot:
            disk.before = disk.snapshot, disk.journal
        disk.snapshot, disk.journal = saved, self._head()

    def _head(self) -> list[tuple[dict[str, Any], tuple[bytes, ...]]]:
        """What a new journal begins with."""
        return [(copy.deepcopy(record), tuple(bytes(frame) for frame in frames)) for record, frames in self.coordinator.replayed.pending()]

    def half_a_snapshot(self) -> None:
        """The disk takes the new journal, and then no snapshot: the one before counts, with both journals."""
        self.disk.journal += self._head()
        self.crash()

    def spoil(self) -> None:
        """The newest snapshot cannot be read any more, and the coordinator comes back from the one before it."""
        if self.disk.before is not None:
            (self.disk.snapshot, journal), self.disk.before = self.disk.before, None
            self.disk.journal = journal + self.disk.journal
            self.crash()

    def crash(self, whole: bool = True) -> None:
        """The coordinator is gone, and comes back from what its disk holds."""
        before, self.crashes = self.coordinator, self.crashes + 1
        self.coordinator = believing(Coordinator(self.plan, self.strategy, Numbers(SIZE)))
        self.coordinator.learner.vector.copy_(self.disk.snapshot["vector"])
        self.coordinator.load_state_dict(copy.deepcopy(self.disk.snapshot))
        lines = self.disk.ledger[: self.disk.snapshot["ledger"]]
        for record, frames in copy.deepcopy(self.disk.journal):
            lines += [effect.line for effect in self.coordinator.replayed.apply(record, frames) if isinstance(effect, LedgerEntry)]
        if whole:
            assert lines == self.disk.ledger
            self.check_same(before, self.coordinator)
        self.disk.ledger = lines
        self.callers.clear()
        self.event(ServingStarted())

    def check_same(self, before: Coordinator, after: Coordinator) -> None:
        assert torch.equal(before.learner.vector, after.learner.vector), "the weights are the same to the bit"
        durable = ("accepted",)
        for name, value in vars(before.state).items():
            if name == "contributions":
                assert {key: value.get(key) for key in durable} == {key: after.state.contributions.get(key) for key in durable}
            else:
                assert value == getattr(after.state, name), name
        assert [record for record, _ in before.replayed.pending()] == [record for record, _ in after.replayed.pending()]
        counted = [{number: dict(there.sent) for number, there in one.rounds.open.items()} for one in (before, after)]
        assert counted[0] == counted[1], "each contribution of an open round is counted once"

    # --- workers --------------------------------------------------------------------------------------

    def act(self, worker: Traveller) -> None:
        """Hear the answer that has come, and say what is to be said next."""
        if worker.call >= 0 and worker.answer is None:
            return
        if worker.answer is not None:
            (header, frames), worker.call, worker.answer = worker.answer, -1, None
            self.hear(worker, header, frames)
        self.speak(worker)

    def speak(self, worker: Traveller) -> None:
        """What the protocol has to say; where that is nothing, the worker computes first."""
        protocol = worker.protocol
        if protocol.session and protocol.have >= 0 and protocol.pending is None:
            if not self.strategy.feed.leased:
                self.compute(worker)
            elif worker.unit is not None:
                self.learn(worker, worker.unit)
            else:
                protocol.claim()
        self.send(worker)

    def compute(self, worker: Traveller) -> None:
        if self.plan.tasks is not None:
            worker.epoch, worker.position = worker.protocol.place
        worker.position += 1
        if worker.position > LONGEST:
            worker.epoch, worker.position = worker.epoch + 1, 1
        worker.steps += 1
        value = self.value(worker.seat, worker.epoch, worker.position)
        made = contribution(worker.epoch, worker.position, worker.protocol.have, value)
        worker.protocol.contribute(made, self.encoded(value), pulls=worker.steps % self.strategy.pull.every == 0)

    def value(self, seat: int, epoch: int, position: int) -> float:
        """Tasks are cut from the same batches for all, whichever seat they are."""
        return value_of(seat if self.plan.tasks is None else 0, epoch, position)

    def learn(self, worker: Traveller, unit: LeasedUnit) -> None:
        """A unit counts as its last batch does."""
        worker.unit, end = None, unit.start + unit.batches
        if worker.steps % 7 == 3:  # now and then it cannot be done, or somebody else may do it
            worker.protocol.fail(unit.number, "a test") if worker.steps % 2 else worker.protocol.give_back(unit.number)
        else:
            value = value_of(0, unit.epoch, end)
            made = contribution(unit.epoch, end, worker.protocol.have, value, batches=unit.batches, unit=unit.number)
            worker.protocol.contribute(made, self.encoded(value), pulls=False)
        worker.steps += 1

    def encoded(self, value: float) -> Any:
        return codecs.encode(self.plan.updates.codec, torch.full((SIZE,), value), None)

    def send(self, worker: Traveller) -> None:
        """Put the protocol's question on its way; an earlier one may still be."""
        question = worker.protocol.next_request(self.now)
        if question is not None:
            self.calls += 1
            worker.call, worker.answer = self.calls, None
            self.letters.append(Letter(worker, self.calls, question.asked, question.frames))

    def hear(self, worker: Traveller, header: dict[str, Any], frames: Any) -> None:
        if header["kind"] == "refused":
            assert header["reason"] in ("unknown-session", "replayed", "asked-again", "unknown-nonce"), header
        else:
            assert header.get("version", worker.seen) >= worker.seen, "versions never go back, whatever crashed"
            worker.seen = header.get("version", worker.seen)
        for event in worker.protocol.on_answer(header, frames):
            if isinstance(event, SeatAssigned):
                worker.seat, worker.epoch, worker.position = event
            elif isinstance(event, LeasedUnit):
                worker.unit = event
            elif isinstance(event, ContributionReceipt):
                # "ahead": the round waits for others, and holds as many of this worker as it takes
                # "moved", "overtaken": nobody heard of it for long, and its task was given to another, which may have done its work
                others = ("moved", "overtaken") if self.plan.tasks is not None else ()
                fair = ("accepted", "late", "cancelled", "stale", "finished", "ahead", *others)
                assert event.status in fair, f"an honest worker is told {event.status}"
                if event.status == "accepted":
                    self.confirmed.append((worker.name, event.seq))

    # --- what happens ---------------------------------------------------------------------------------

    def deliver(self, letter: Letter, keep: bool = False) -> None:
        if not keep:
            self.letters.remove(letter)
        self.calls += 1
        self.callers[self.calls] = letter
        self.event(RequestReceived(self.calls, letter.asked, letter.frames, f"session-{self.calls}"))

    def die(self, worker: Traveller) -> None:
        """The process ends; one of the same name knows nothing of it."""
        self.workers[self.workers.index(worker)] = Traveller(worker.name, worker.life + 1)

    def leave(self, worker: Traveller) -> None:
        """It says goodbye, without waiting for the answer, and another of its name may come."""
        protocol = worker.protocol
        if protocol.session and worker.call < 0:
            self.calls += 1
            self.letters.append(Letter(worker, self.calls, Leave(protocol.session, protocol._number + 1), ()))
            self.die(worker)

    def beat(self) -> None:
        for worker in self.workers:
            if worker.protocol.session:
                self.calls += 1
                letter = Letter(worker, self.calls, worker.protocol.heartbeat("waiting", {}), ())
                self.callers[self.calls] = letter
                self.event(RequestReceived(self.calls, letter.asked, ()))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.event(Tick())
        self.check_patience()

    def check_patience(self) -> None:
        """Nobody is held back long without a word; no round but the first, which waits for all to start, is open beyond its deadline."""
        now, version, rounds = self.coordinator.now, self.coordinator.state.version, self.strategy.rounds
        claiming = self.coordinator.units.claims.values() if self.coordinator.units is not None else ()
        assert all(now - waited.since < LONGEST_WAIT_S for waited in [*self.coordinator.replies.held.values(), *claiming])
        if rounds.waits_for_all and version > 0 and version in self.coordinator.rounds.open and not self.coordinator.finished:
            life, since = self.open_since.get(version, (self.crashes, now))
            self.open_since[version] = (self.crashes, since if life == self.crashes else now)
            assert now - self.open_since[version][1] < rounds.deadline_s

    def rest(self, worker: Traveller) -> None:
        """For a minute a worker gives signs of life, and nothing else, while the others work."""
        for _ in range(15):
            self.pass_time(4.0)
            self.beat()
            for number, other in enumerate(self.workers):
                if other is not worker and not self.coordinator.finished:  # then it would be told so, and stop
                    self.happen("go", number)

    def happen(self, kind: str, number: int) -> None:
        """One thing, right or wrong."""
        worker = self.workers[number % len(self.workers)]
        letter = self.letters[number % len(self.letters)] if self.letters else None
        if kind == "act":
            self.act(worker)
        elif kind == "go":  # all is well for once
            for _ in range(1 if worker.protocol.session else 2):  # to join takes two questions
                self.act(worker)
                for own in [one for one in self.letters if one.sender is worker and one.call == worker.call]:
                    self.deliver(own)
        elif kind == "deliver" and letter:
            self.deliver(letter)
        elif kind == "double" and letter:
            self.deliver(letter, keep=True)
        elif kind == "lose" and letter:
            self.letters.remove(letter)
        elif kind == "again" and worker.call >= 0:  # no answer came in time
            worker.protocol.on_no_answer(self.now, "a test")
            self.send(worker)
        elif kind == "die":
            self.die(worker)
        elif kind == "leave":
            self.leave(worker)
        elif kind == "crash":
            self.dies_after = number
        elif kind == "snapshot":
            self.snapshot()
        elif kind == "full":
            self.full_for = 1 + number % 3
        elif kind == "half":
            self.half_a_snapshot()
        elif kind == "spoil":
            self.spoil()
        elif kind == "rest":
            self.rest(worker)
        elif kind == "time":
            self.pass_time((0.1, 1.0, 4.0, 6.0, 11.0, 40.0, -30.0)[number % 7])

    def calm_down(self) -> None:
        """The weather clears. Everybody must get somewhere, or hear that it is over; one may be gone for good."""
        if len(self.workers) > 2 and len(self.letters) % 2:
            del self.workers[0]
        self.letters.clear()
        self.dies_after, self.full_for = None, 0
        for worker in self.workers:
            if worker.call >= 0:
                self.send(worker)
        goal = {worker.name: self.count(worker) + 2 for worker in self.workers}
        all_of_them = sum(goal.values())
        for _ in range(200):
            for worker in self.workers:
                self.act(worker)
                for letter in [one for one in self.letters if one.sender is worker]:
                    self.deliver(letter)
            self.beat()
            self.pass_time(1.0)
            counts = [self.count(worker) for worker in self.workers]
            if self.coordinator.finished or all(count >= goal[worker.name] for count, worker in zip(counts, self.workers, strict=True)):
                return
            if self.plan.most_lag == 0 and self.strategy.feed.leased and sum(counts) >= all_of_them:
                return  # of several who have a unit, the first that hands in may make the others' results worthless, each time
        raise AssertionError(f"somebody waits for ever: {[self.count(worker) for worker in self.workers]} of {goal}")

    def count(self, worker: Traveller) -> int:
        return sum(name == worker.name for name, _ in self.confirmed)

    def settle(self) -> None:
        """Answers that are still held back come, when time passes."""
        for _ in range(60):
            self.pass_time(1.0)
        assert not self.coordinator.replies.held
        assert not self.callers, "every question is answered"
        for worker in self.workers:
            header = worker.answer[0] if worker.answer is not None else {}
            if header.get("status") == "accepted":
                self.confirmed.append((worker.name, header["seq"]))

    def end(self) -> None:
        if self.coordinator.finished:
            self.event(RunConcluded())

    # --- what must hold -------------------------------------------------------------------------------

    def check_lags(self, version: int, units: list[Any]) -> None:
        """A unit counts 1/(1+lag) in the round in which it arrived, and lags no more than the present workers allow."""
        strategy, most = self.strategy, self.plan.most_lag
        most = bound_for(self.most_workers, strategy.rounds.contributions) if most is None else most
        for _, _, base, share, *_ in units:
            lag = version - 1 - base
            assert 0 <= lag <= most, f"a result that lags {lag} versions"
            assert share == 1 / (1 + lag), "a late result counts less"

    def check(self) -> None:
        applied, others = [], []
        weights = torch.zeros(SIZE, dtype=torch.float64)
        version = 0
        for line in self.disk.ledger:
            if "version" in line:
                version += 1
                assert line["version"] == version, "versions count up by one"
                weights -= RATE * sum(one[3] * self.value(*one[5:8]) for one in line["from"]) / len(line["from"])
                applied += line["from"]
                if self.strategy.feed.leased:
                    self.check_lags(version, line["from"])
            elif "failed" not in line:
                others += line["unused"]
        assert version == self.coordinator.state.version
        waiting = [(record["worker"], record["seq"]) for record, _ in self.coordinator.replayed.pending()]
        known = [(one[0], one[1]) for one in applied + others] + waiting
        assert len(known) == len(set(known)), "nothing is counted twice"
        assert set(self.confirmed) <= set(known), "what was confirmed is in the weights, or it is said why not"
        if not self.strategy.feed.leased:
            newest: dict[str, int] = {}
            for worker, seq, *_ in applied:
                assert seq > newest.get(worker, -1), "a worker's contributions are in the weights in the order in which it made them"
                newest[worker] = seq
        batches = [tuple(one[6 if self.plan.tasks else 5 : 8]) for one in applied + others]
        assert len(batches) == len(set(batches)), "each batch of a seat is learned from once"
        assert torch.allclose(self.coordinator.learner.vector.double(), weights, rtol=1e-4, atol=1e-3)
