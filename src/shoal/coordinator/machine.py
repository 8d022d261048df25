"""The coordinator: `handle(event, now) -> effects`. It opens nothing, reads no clock, starts no thread.

What changes the weights goes through `record`: first it becomes a record, then the book takes the record. Nothing is confirmed before that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from shoal.coordinator.book import Book
from shoal.coordinator.claims import MOST_UNRECORDED, Claims
from shoal.coordinator.closing import Closing
from shoal.coordinator.doorkeeper import Bucket, Doorkeeper, Refusal
from shoal.coordinator.effects import Effect, Frames, Note, Persist, Published, Reply, Stop
from shoal.coordinator.lending import Lender
from shoal.coordinator.membership import Membership, Worker
from shoal.coordinator.orders import Orders
from shoal.coordinator.pacing import steps_for
from shoal.coordinator.policies import Policies
from shoal.coordinator.publisher import MOST_SETS, PartPublisher, Publisher
from shoal.coordinator.seals import seal
from shoal.coordinator.state import (
    Adopted,
    Called,
    Concluded,
    Event,
    Exited,
    Interrupted,
    Learner,
    LeaseResult,
    Opened,
    Plan,
    Spoiled,
    State,
    Tick,
    Upstream,
    Waiting,
    accepted,
)
from shoal.coordinator.tasking import Taskmaster
from shoal.errors import printable
from shoal.updates import codecs
from shoal.updates.answers import InexactAnswers, digest
from shoal.updates.holding import Experts, size_of, told
from shoal.updates.messages import PROTOCOL, Asked, Claim, Contribute, Fail, GiveBack, Gone, Heartbeat, Hold, Join, Leave, Order, Pull

LONGEST_WAIT_S = 5.0
"""An answer is never held back longer: a worker that hears nothing may then take the connection for lost."""
_MOST_DATA = 2**31
"""No data has so many epochs, and no epoch so many batches."""
_NO_WEIGHTS = -2
_UNSEATED = -1
_STUCK = "stuck"
"""What a worker says that has made no progress for many leases: the thread that gives signs of life goes on whatever happens."""
_NOTES_PER_S, _NOTES_AT_ONCE = 1.0, 200.0
"""Comings and goings that people are told of; those beyond it are counted."""


class Coordinator:
    """Holds the weights and decides what enters them."""

    def __init__(self, plan: Plan, policies: Policies, learner: Learner) -> None:
        self.plan, self.policies, self.learner = plan, policies, learner
        self.book = Book(plan, policies, learner)
        self.rounds = self.book.rounds
        self.closing = Closing(plan, policies, self.book)
        self.members = Membership(plan.heartbeat_interval_s, plan.bounds.sessions)
        self.members.known = self.state.seats
        self.publisher = Publisher(plan.updates.codec)
        self.publisher.publish(0, learner.vector, learner.buffers)
        self.parts = PartPublisher(self.publisher, plan.experts)
        contributions = policies.rounds.expected_contributions(plan.expected)
        self.lender = Lender(self, plan.cut, contributions) if plan.cut is not None else None
        """Where the data is leased in units."""
        self.tasks = Taskmaster(self, plan.tasks) if plan.tasks is not None else None
        """Where a scheduler gives out shares of the data."""
        self.waiting: OrderedDict[str, Waiting] = OrderedDict()
        """By session, longest first: who is answered when a round has closed."""
        self.stopped = ""
        self.refused: dict[str, int] = {}
        self.now = 0.0
        """Time as the coordinator sees it: it never goes back."""
        self.claims = Claims(plan, plan.bounds.devices * max(1, plan.batches_per_step // max(1, contributions)), self.refused)
        self.door = Doorkeeper(self.members, plan.bounds)
        self.orders = Orders(self)
        """What the run's owner wants."""
        self._notes, self._untold = Bucket(_NOTES_PER_S, _NOTES_AT_ONCE), 0
        self._clock: float | None = None
        self._effects: list[Effect] = []

    # --- events ------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What is to be done about an event. When the clock jumps back, time stands still for a moment and then goes on from there."""
        if self._clock is not None and now > self._clock:
            self.now += now - self._clock
        self._clock, self._effects = now, []
        more = False
        if isinstance(event, Called):  # by far the most
            self._answer(event)
        else:
            more = self._happen(event)
        if self.rounds.open and not more:
            self._close_what_is_due()
        if self.lender is not None:
            self._lend(self.lender, more)
        if self.plan.needed > 1 and not self.state.paused:
            self._watch_quorum()
        return self._effects

    def _happen(self, event: Event) -> bool:
        """Do what the event asks for. Return whether others follow that belong to it."""
        match event:
            case Tick():
                self._evict_silent()
                self._evict_uninvited()
                self._forget_unused()
                self._reassure()
                if self.tasks is not None and not self.state.paused:
                    self.tasks.look_around()
            case LeaseResult():
                assert self.lender is not None
                self.lender.take(event)
                return event.more
            case Spoiled():
                assert self.lender is not None
                self.lender.spoil(*event)
            case Exited():
                self.lose(event.name, "is gone")
            case Opened():
                self.door.recall(self.state, self.now)
                for name, guest in self.state.quarantined.items():
                    self.members.quarantine(name, guest, self.now + self.plan.bounds.quarantine_s)
                if self.state.paused:
                    self.emit(Note("the run is paused, as its owner wanted: `shoal resume` lets it go on"))
                if self.lender is not None:
                    self.lender.offer()
            case Interrupted():
                self.stop_for(event.reason)
            case Concluded():
                self.emit(*self.book.write_off())
            case Adopted():
                self._adopt(event)
        return False

    def emit(self, *effects: Effect) -> None:
        self._effects += effects

    @property
    def state(self) -> State:
        return self.book.state

    @property
    def finished(self) -> bool:
        plan, state = self.plan, self.book.state
        if plan.cut is not None and self.closing.all_settled and self.rounds.workers(state.version) < plan.needed:
            return True  # what is left, if anything, will never be enough
        reached = state.version >= plan.total_steps if plan.total_batches is None else state.batches >= plan.total_batches
        return reached or bool(self.stopped)

    @property
    def step(self) -> float:
        """Where the schedule stands: updates made, or what the batches so far are worth."""
        return self.book.step

    def end_here(self) -> None:
        """The run is complete with the newest version: its data was read as often as it was to be."""
        self.plan = self.plan._replace(total_steps=self.state.version)

    def stop_for(self, reason: str) -> None:
        """End the run: a worker that asks from now on, or waits, is told so."""
        self.stopped = reason
        self._release()

    # --- questions ---------------------------------------------------------------------------------

    def _answer(self, event: Called) -> None:
        asked = event.asked
        if event.guest and (refusal := self.door.welcomes(event.guest)).reason:
            self._show_out(event.guest)
            return self.refuse(event.caller, *refusal)
        if isinstance(asked, Order):
            return self.orders.hear(event, asked)
        if isinstance(asked, (Join, Gone)):
            return self._join(event, asked) if isinstance(asked, Join) else self._hear_of_end(event, asked)
        worker, beats = self.members.by_session.get(asked.session), isinstance(asked, Heartbeat)
        if worker is None:
            return self.refuse(event.caller, "unknown-session")
        if asked.number <= worker.numbers[beats]:
            return self.refuse(event.caller, "replayed")
        worker.numbers[beats] = asked.number
        self.members.hear(worker, self.now)
        if worker.name in self.rounds.absent:
            self.rounds.activate(worker.name)  # a sign of it: rounds wait for it again
        # Most of what a crowd says are signs of life, so they take the short way.
        return self._pulse(event.caller, asked, worker) if isinstance(asked, Heartbeat) else self._answer_member(event, asked, worker)

    def _answer_member(self, event: Called, asked: Asked, worker: Worker) -> None:
        match asked:
            case Contribute():
                worker.received_bytes += sum(len(frame) for frame in event.frames)
                self._contribute(event, asked, worker)
            case Pull():
                if self.tasks is not None:
                    self.tasks.begin(worker)
                self.rounds.activate(worker.name)
                self.answer(event.caller, {"kind": "weights"}, worker, asked.have)
            case Hold():
                self._hold(event.caller, tuple(asked.experts), worker)
            case Claim() | GiveBack() | Fail():
                self._answer_about_unit(event.caller, asked, worker)
            case Leave():
                self._remove(worker, f"left: {printable(asked.reason)}" if asked.reason else "left", left=True)
                self.answer(event.caller, {"kind": "goodbye"}, worker)

    def _hold(self, caller: Any, experts: Experts, worker: Worker) -> None:
        """A worker takes part with some of the experts. What it is sent, and what it may send, is of these from now on."""
        problem = self.claims.why_not_held(experts)
        if worker.name in self.rounds.active:
            problem = "it has begun with other weights: a worker says what it holds before it asks for weights"
        elif not problem and not self.parts.has_room_for(experts):
            problem = f"workers hold {MOST_SETS} different sets of experts already: take one of theirs"
        if problem:
            self._tell_of_member(f"{worker.name} cannot hold experts {told(experts)}: {problem}")
            return self.refuse(caller, "unfit", f"experts {told(experts)}: {problem}")
        assert self.plan.experts is not None
        worker.experts = experts
        self.parts.hold(worker.session, experts)
        self._tell_of_member(f"{worker.name} holds experts {told(experts)} of {self.plan.experts.per_layer}")
        return self.answer(caller, {"kind": "held", "size": size_of(self.plan.experts, experts)}, worker)

    def _pulse(self, caller: Any, asked: Heartbeat, worker: Worker) -> None:
        worker.state, worker.figures = printable(asked.state), self.claims.figures(asked.figures)
        if self.lender is not None and asked.state != _STUCK:
            self.lender.renew(worker)
        # What a worker reads of the answer, and no more: there are many more signs of life than anything else.
        header: dict[str, Any] = {"kind": "pulse", "version": self.book.state.version, "done": self.finished}
        if worker.word:
            header["word"], worker.word = worker.word, ""
        self._effects.append(Reply(caller, header))

    def _answer_about_unit(self, caller: Any, asked: Claim | GiveBack | Fail, worker: Worker) -> None:
        lender = self.lender
        if lender is None or lender.leases is None:
            return self.refuse(caller, "impossible", "this run has no units on lease here")
        if isinstance(asked, Claim):
            self.rounds.activate(worker.name)
            return self._answer_no_longer(lender.claim(caller, asked, worker))
        if isinstance(asked, GiveBack):
            lender.give_back(worker, asked.unit)
        elif lender.fail(worker, asked.unit, printable(asked.reason)):
            self._count_failure(worker, printable(asked.reason))
        return self.answer(caller, {"kind": "noted"}, worker)

    def _answer_no_longer(self, caller: Any) -> None:
        """The worker asked again: nothing comes of its first question."""
        if caller is not None:
            self.emit(Reply(caller, {"kind": "refused", "reason": "asked-again", "detail": ""}))

    def refuse(self, caller: Any, reason: str, detail: str = "") -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self.emit(Reply(caller, {"kind": "refused", "reason": reason, "detail": detail}))

    def answer(self, caller: Any, header: dict[str, Any], worker: Worker, have: int = _NO_WEIGHTS) -> None:
        """Answer, with weights for a worker that has version `have`."""
        fields, frames = self.parts.since(worker.session, have) if have > _NO_WEIGHTS else ({}, ())
        most_lag = self.policies.admission.most_lag(self.members.speed(worker))
        version = self.book.state.version
        header = {**header, "version": version, "step": self.book.step, "done": self.finished, "most_lag": most_lag, **fields}
        if self.policies.contribution.alone and have > _NO_WEIGHTS:
            worker.began_at = self.now
            steps = steps_for(self.policies, self.plan, version, worker, self.members, self.now)
            header["inner_steps"] = min(steps, self.state.upstream.get("inner_steps", steps))
        if self.tasks is not None:
            header |= self.tasks.place(worker)
        self._effects.append(Reply(caller, header, frames))

    # --- members -----------------------------------------------------------------------------------

    def _join(self, event: Called, asked: Join) -> None:
        """Let a worker in that proves to have its key. What it asked for first is answered with what to sign."""
        if asked.protocol != PROTOCOL:
            return self.refuse(event.caller, "protocol", f"the coordinator speaks version {PROTOCOL}: install the same version of shoal")
        if not asked.proof:
            return self.emit(Reply(event.caller, self.door.challenge(event.session, self.now)))
        challenge, refusal = self.door.check(asked, "join", None, self.now, event.address)
        if refusal.reason:  # before the name: to find one that is free may take long where a crowd has come under names like it
            return self.refuse(event.caller, *refusal)
        name = self.door.name_for(asked, self.state)
        before = self.members.by_name.get(name)
        refusal = self.door.compare(challenge, before)
        if not refusal.reason:
            refusal = self.door.admit(name, asked.key, event.guest, self.state, self.now, event.address)
        if not refusal.reason and self.tasks is not None and (unfit := self.tasks.unfit(name)):
            self._tell_of_member(f"{name} cannot take part: {unfit}")
            refusal = Refusal("unfit", unfit)
        if refusal.reason:
            return self.refuse(event.caller, *refusal)
        if asked.instance in self.members.replaced.get(name, ()):
            return self.refuse(event.caller, "replaced", f"another worker called {name} has come; start this one with a --name of its own")
        returns = name in self.rounds.active and self.policies.contribution.alone  # it may have kept half of a long round
        if before is not None:
            if asked.instance != before.instance:
                self.members.replace(before)
            self._remove(before, "came back", left=asked.instance == before.instance)
        if returns:
            self.rounds.returning.add(name)
        worker = self._seat(event, asked, name, challenge)
        self.answer(event.caller, self._welcome(worker), worker)
        if before is None:
            self._tell_of_joining(worker, asked.name)
        return None

    def _seat(self, event: Called, asked: Join, name: str, challenge: int) -> Worker:
        """Give a worker its place. Its name and its key belong together from now on."""
        about = {key: printable(value) for key, value in asked.about.items()}
        seat = None if self.tasks is None else self.tasks.seat_for(name)
        seat = _UNSEATED if self.tasks is not None and seat is None else seat
        worker = self.members.add(name, event.session, about, self.now, asked.instance, event.guest, seat)
        worker.challenge, worker.address = challenge, event.address
        self._recall(worker)
        if self.tasks is not None and worker.seat == _UNSEATED:
            self.tasks.seat(worker)
        if self.state.seats.get(name) != worker.seat or self.state.keys.get(name) != asked.key:
            self.record({"kind": "seated", "worker": name, "seat": worker.seat, "key": asked.key})
        return worker

    def _recall(self, worker: Worker) -> None:
        """How a worker stands that may have been here before, with this coordinator or one that was killed. After too many failures it may
        try one more unit: whoever started it again may have mended it."""
        seq, seat, *seen = self.state.seen.get(worker.name, (-1, worker.seat, 0, 0))
        epoch, position = max(self.state.positions.get(str(worker.seat), [0, 0]), seen if seat == worker.seat else [0, 0])
        worker.seen_seq = max(seq, self.state.sequences.get(worker.name, -1))
        worker.seen_place = epoch, position
        worker.failed = min(self.state.failures.get(worker.name, 0), self.plan.bounds.failures - 1)

    def _tell_of_joining(self, worker: Worker, wanted: str | None) -> None:
        whose = f"{worker.name} joined ({', '.join(worker.about.values())})" if worker.about else f"{worker.name} joined"
        other = "" if wanted in (None, worker.name) else f": it asked for the name {wanted}, which belongs to another worker"
        self._tell_of_member(whose + other)

    def _tell_of_member(self, text: str) -> None:
        """Who comes and goes is told to people, but a crowd at the door does not fill their screen."""
        if not self._notes.take(self.now):
            self._untold += 1
            return
        if self._untold:
            self.emit(Note(f"{self._untold} more workers came or went"))
            self._untold = 0
        self.emit(Note(text))

    def _hear_of_end(self, event: Called, asked: Gone) -> None:
        """Whoever has a worker's key says that its processes have ended."""
        if not asked.proof:
            return self.emit(Reply(event.caller, self.door.challenge(event.session, self.now)))
        _, refusal = self.door.check(asked, "gone", self.members.by_name.get(asked.name), self.now, event.address)
        if not refusal.reason and self.state.keys.get(asked.name) != asked.key:
            refusal = Refusal("unproved", f"{asked.name} has another key")
        if refusal.reason:
            return self.refuse(event.caller, *refusal)
        self.lose(asked.name, "has lost a process, and starts again")
        return self.emit(Reply(event.caller, {"kind": "goodbye"}))

    def _welcome(self, worker: Worker) -> dict[str, Any]:
        epoch, position = self.state.positions.get(str(worker.seat), (0, 0))
        last = self.state.sequences.get(worker.name, -1)
        known = {"name": worker.name, "session": worker.session, "seat": self.plan.data_seat(worker.seat)}
        return {"kind": "welcome", **known, "epoch": epoch, "position": position, "last_seq": last}

    def _remove(self, worker: Worker, why: str, left: bool = False) -> None:
        """A worker takes part no longer. `left`: it said so itself, or comes back at once."""
        self.members.remove(worker)
        self.rounds.deactivate(worker.name)
        self.parts.forget(worker.session)
        waited = self.waiting.pop(worker.session, None)
        callers = [waited.caller if waited is not None else None, self.lender.forget(worker, left) if self.lender is not None else None]
        for caller in callers:
            if caller is not None:
                self.refuse(caller, "unknown-session")
        self.door.leave(worker.name, self.state, self.now)
        self._tell_of_member(f"{worker.name} {why}")

    def _forget_unused(self) -> None:
        while (name := self.members.released(self.now)) is not None:
            self.record({"kind": "quarantined", "worker": name, "guest": "", "out": False})
        while (name := self.door.forgettable(self.state, self.now)) is not None:
            self.record({"kind": "forgotten", "worker": name})
            self.members.replaced.pop(name, None)
            if self.lender is not None and self.lender.leases is not None:
                self.lender.leases.forget(name)

    def has_failed_too_often(self, worker: Worker) -> bool:
        """Until one of the others has shown whether the units can be done at all."""
        return worker.failed >= self.plan.bounds.failures

    def at_work(self) -> Iterator[str]:
        most = self.plan.bounds.failures
        return (name for name, worker in self.members.by_name.items() if worker.failed < most)

    def blame(self, name: str, reason: str) -> None:
        if (worker := self.members.by_name.get(name)) is not None:
            worker.word = f"the coordinator has given this worker's unit to another one: {reason}"
            self._count_failure(worker, reason)

    def _count_failure(self, worker: Worker, reason: str) -> None:
        """A worker that fails unit after unit, while others manage theirs, would use up everybody's attempts."""
        worker.reject("failed")
        worker.failed += 1
        self.record({"kind": "blamed", "worker": worker.name, "failed": worker.failed})
        others = [one for one in self.members.by_name.values() if one is not worker and one.accepted and not one.failed]
        if worker.failed < self.plan.bounds.failures or not others:
            return
        self.members.quarantine(worker.name, worker.guest, self.now + self.plan.bounds.quarantine_s)
        self.record({"kind": "quarantined", "worker": worker.name, "guest": worker.guest, "out": True})
        whom = f", with newcomers on the invitation of {worker.guest}," if worker.guest else ""
        self.emit(
            Note(
                f"warning: {worker.name} failed {worker.failed} units in a row that others manage, and is kept out{whom} for "
                f"{self.plan.bounds.quarantine_s:.0f} s: {reason}"
            )
        )
        self._remove(worker, "is in quarantine", left=True)

    def lose(self, name: str, why: str) -> None:
        """A worker takes part no longer, and has not said so itself."""
        if (worker := self.members.by_name.get(name)) is not None:
            self._remove(worker, why)
            self._close_what_is_due()

    def _evict_silent(self) -> None:
        while (worker := self.members.silent(self.now)) is not None:
            self._remove(worker, f"is taken for dead: silent for {self.now - worker.seen_at:.0f} s")

    def _evict_uninvited(self) -> None:
        for guest in [guest for guest, workers in self.members.guests.items() if guest and workers]:
            if self.door.welcomes(guest).reason:
                self._show_out(guest)

    def _show_out(self, guest: str) -> None:
        """The invitation of a person was withdrawn: their workers take part no longer. What was accepted of them stays."""
        theirs = [worker for worker in self.members.by_name.values() if worker.guest == guest]
        if not theirs:
            return
        self.record({"kind": "withdrawn", "guest": guest, "workers": [worker.name for worker in theirs]})
        for worker in theirs:
            self._remove(worker, f"is shown out: the invitation of {guest} was withdrawn", left=True)

    # --- contributions -----------------------------------------------------------------------------

    def _contribute(self, event: Called, asked: Contribute, worker: Worker) -> None:
        if asked.seq == self.state.sequences.get(worker.name, -1):
            self.rounds.activate(worker.name)  # it has the weights that this was computed on
            return self._receipt(event.caller, worker, asked, "accepted", repeated=True)
        if asked.base > self.state.version or worker.name not in self.rounds.active:
            return self.refuse(event.caller, "impossible", "an update of weights that were never sent")
        if asked.batches > self.claims.most_batches or max(asked.epoch, asked.position) >= _MOST_DATA:
            return self.refuse(event.caller, "impossible", "more data than the run has for one contribution")
        if not self.claims.in_reach(asked, worker.seen_seq, worker.seen_place if self.tasks is None else None):
            return self.refuse(event.caller, "misplaced", "a number, or a place at the data, that this worker cannot have come to")
        self._see(worker, asked)
        if (asked.unit >= 0) != (self.lender is not None and self.lender.leases is not None):
            return self.refuse(event.caller, "impossible", "not what this run's workers send")
        self.members.arrive(worker, self.now, self.plan.telemetry_alpha)
        self.members.time(worker, asked.batches, self.now, self.plan.telemetry_alpha)
        worker.lag = self._lag(worker, asked.base)
        return self._submit(event, asked, worker) if asked.unit >= 0 else self._admit(event, asked, worker)

    def _see(self, worker: Worker, asked: Contribute) -> None:
        """Note how far a worker has come, whatever becomes of what it sends. Where much is turned away, that survives a crash, too: else
        the worker would come back with numbers that it cannot have come to."""
        worker.seen_seq, worker.seen_place = max(worker.seen_seq, asked.seq), max(worker.seen_place, (asked.epoch, asked.position))
        known = max(self.state.sequences.get(worker.name, -1), self.state.seen.get(worker.name, (-1,))[0])
        if worker.seen_seq - known > MOST_UNRECORDED:
            place = {"seat": worker.seat, "epoch": worker.seen_place[0], "position": worker.seen_place[1]}
            self.record({"kind": "seen", "worker": worker.name, "seq": worker.seen_seq, **place})

    def _move_on(self, worker: Worker, asked: Contribute) -> None:
        if self.tasks is not None:
            self.tasks.move_on(worker, asked)

    def _admit(self, event: Called, asked: Contribute, worker: Worker) -> None:
        share = self.policies.admission.share(worker.lag, self.members.speed(worker))
        problem = self._problem(worker, asked) or ("stale" if share <= 0 else "")
        if problem:
            return self._turn_away(event.caller, asked, worker, problem)
        return self._accept(event, asked, worker, share)

    def _turn_away(self, caller: Any, asked: Contribute, worker: Worker, problem: str) -> None:
        worker.reject(problem)
        self.state.count(problem)
        self._move_on(worker, asked)
        self._receipt(caller, worker, asked, problem)

    def _accept(self, event: Called, asked: Contribute, worker: Worker, share: float) -> None:
        number = self._round_for(worker, asked)
        late = self.policies.rounds.window > 0 and asked.round < number
        try:
            decoded = self.book.decode(event.frames, number, worker.experts)
        except codecs.UpdateError as error:
            worker.reject("malformed")
            return self.refuse(event.caller, "malformed", str(error))
        worker.accepted += 1
        made = accepted(worker.name, worker.seat, self.claims.believed(asked, worker.name), share, number, late, worker.experts)
        self.record(made, event.frames, decoded)
        self._move_on(worker, asked)
        self._close_what_is_due()  # the answer then brings the weights that this contribution moved
        return self._receipt(event.caller, worker, asked, "accepted")

    def _submit(self, event: Called, asked: Contribute, worker: Worker) -> None:
        """Take a unit's result, where the coordinator keeps the leases."""
        assert self.lender is not None
        if self.finished:
            return self._turn_away(event.caller, asked, worker, "finished")
        try:
            outcome = self.lender.submit(worker, asked, event.frames)
        except InexactAnswers as error:
            return self._tell_inexact(event, asked, worker, str(error))
        except codecs.UpdateError as error:
            self.refuse(event.caller, "malformed", str(error))
            return self._count_failure(worker, "what it sent cannot be used")
        if outcome != "accepted":
            return self._turn_away(event.caller, asked, worker, outcome)
        worker.accepted += 1
        worker.failed = 0
        self._close_what_is_due()
        return self._receipt(event.caller, worker, asked, "accepted")

    def _tell_inexact(self, event: Called, asked: Contribute, worker: Worker, why: str) -> None:
        """Name a worker whose answers are not what they should be: in the ledger, to people, and to itself."""
        fields = {"worker": worker.name, "seq": asked.seq, "unit": asked.unit, "base": asked.base, "reason": why}
        self.record({"kind": "inexact", **fields, "digest": digest(event.frames)})
        self.state.count("inexact")
        self._tell_of_member(f"warning: unit {asked.unit} of {worker.name} is refused: {why}")
        self._receipt(event.caller, worker, asked, "inexact")
        self._count_failure(worker, why)

    def _lag(self, worker: Worker, base: int) -> int:
        """Versions that the update does not know of. A worker that steps its own weights knows those it made itself."""
        own_steps = self.policies.contribution.own_steps
        own = sum(1 for version in self.state.made.get(worker.name, ()) if version > base) if own_steps else 0
        return max(0, self.state.version - base - own)

    def _problem(self, worker: Worker, asked: Contribute) -> str:
        """Why a contribution cannot be taken, however fresh it is."""
        if self.finished:
            return "finished"
        if self.tasks is not None and not self.tasks.is_at(worker, asked):
            return "moved"
        if asked.seq < self.state.sequences.get(worker.name, -1) or self._is_learned(worker.seat, asked):
            return "overtaken"
        rounds, version = self.policies.rounds, self._open_round
        has_room = self._has_room_for(worker, self._round_for(worker, asked))
        return rounds.problem(asked.round, version) or ("" if has_room else "ahead")

    @property
    def _open_round(self) -> int:
        """The round that takes contributions. While that of a relay is on its way up, it is the next one."""
        return self.state.version + (self.book.upward is not None)

    def _round_for(self, worker: Worker, asked: Contribute) -> int:
        """The round that a contribution goes into: never one before that of the worker's last one, which an earlier life of it may have
        sent ahead. So what a worker makes is in the weights in the order in which it was made."""
        return max(self.policies.rounds.round_for(asked.round, self._open_round), self.rounds.newest_of(worker.name))

    def _has_room_for(self, worker: Worker, number: int) -> bool:
        """Whether a round takes one more contribution of this worker."""
        return self.rounds.sent_by(worker.name, number) < self.policies.rounds.most_of_one

    def _is_learned(self, seat: int, asked: Contribute) -> bool:
        """Whether a worker in this seat has sent already what was learned from these batches."""
        gone = self.state.positions.get(str(seat))
        return gone is not None and (asked.epoch, asked.position - asked.batches) < (gone[0], gone[1])

    def _receipt(self, caller: Any, worker: Worker, asked: Contribute, status: str, repeated: bool = False) -> None:
        """Answer at once, or when the round has closed if the worker may not go on before. Nobody goes on while the run is paused."""
        free = not self.state.paused and self.policies.rounds.may_send_next(asked.round, self.state.version)
        free = free and self._has_room_for(worker, self.state.version)
        if status == "accepted" and not free and not self.finished:
            before = self.waiting.pop(worker.session, None)
            self._answer_no_longer(None if before is None else before.caller)
            self.waiting[worker.session] = Waiting(caller, asked.seq, asked.have, asked.round, self.now)
            return
        have = asked.have if asked.have >= 0 or status != "accepted" else _NO_WEIGHTS
        self._confirm(caller, worker, asked.seq, status, have, repeated)

    def _confirm(self, caller: Any, worker: Worker, seq: int, status: str, have: int, repeated: bool = False) -> None:
        header = {"kind": "receipt", "status": status, "seq": seq, "round": self.state.version, "repeated": repeated}
        if status in ("accepted", "wait") and self.plan.receipt_key and self.state.sequences.get(worker.name) == seq:
            digest = self.state.digests.get(worker.name, "")
            header |= {"digest": digest, "seal": seal(self.plan.receipt_key, worker.name, seq, digest, self.state.version)}
        self.answer(caller, header, worker, have)

    def _release(self) -> None:
        """Answer those who waited for a round that has closed by now."""
        for session, waited in list(self.waiting.items()):
            free = not self.state.paused and self.policies.rounds.may_send_next(waited.round, self.state.version)
            if free or self.finished:
                self._answer_waiting(session, "accepted" if free else "finished")

    def _reassure(self) -> None:
        """Tell those who have waited long to ask again."""
        while self.waiting:
            session, waited = next(iter(self.waiting.items()))
            if self.now - waited.since < LONGEST_WAIT_S:
                return
            self._answer_waiting(session, "wait")

    def _answer_waiting(self, session: str, status: str) -> None:
        waited = self.waiting.pop(session)
        have = waited.have if waited.have >= 0 and status != "wait" else _NO_WEIGHTS
        self._confirm(waited.caller, self.members.by_session[session], waited.seq, status, have)

    # --- rounds ------------------------------------------------------------------------------------

    def _close_what_is_due(self) -> None:
        while self._may_close() and self.closing.due(self.state.version, self.now):
            number = self.state.version
            held = sorted(self.rounds.open[number].held)
            if (word := self.closing.judge(self.rounds.workers(number))) is not None:
                self.emit(word)
            if self.policies.rounds.waits_for_all:
                self.rounds.miss(number)
            kind = "closed" if self.plan.above is None else "combined"
            self.record({"kind": kind, "round": number, "contributions": [list(key) for key in held]})
            if self.lender is not None:
                self.lender.offer()
            self._release()

    def _may_close(self) -> bool:
        return bool(self.rounds.open) and not (self.finished or self.state.paused) and self.book.upward is None

    def go_on(self) -> None:
        """The run is not held up any more: rounds that are due close, and those who waited for that are answered."""
        self._close_what_is_due()
        self._release()

    # --- a relay ------------------------------------------------------------------------------------

    def begin_below(self, upstream: Upstream) -> None:
        """Begin a relay's run with the weights of the coordinator above, which the learner has already."""
        self.state.upstream = upstream._asdict()
        self.publisher.publish(self.state.version, self.learner.vector, self.learner.buffers)

    def _adopt(self, event: Adopted) -> None:
        """The coordinator above has answered: its weights are the next version here."""
        upward = self.book.upward
        assert upward is not None, "an answer to nothing"
        closed = {name: upward.record[name] for name in ("round", "contributions")}
        self.record({"kind": "adopted", **closed, "status": event.status, "upstream": event.upstream._asdict()}, event.frames)
        if event.done:
            self.end_here()
        self._release()

    def _lend(self, lender: Lender, more: bool) -> None:
        lender.expire()
        if not more:
            lender.offer_more()
        lender.serve(LONGEST_WAIT_S)
        lender.blame()

    def _watch_quorum(self) -> None:
        if self.plan.cut is not None or self.finished:
            return
        word = self.closing.watch(self.state.version, self.now)
        if word is not None:
            self.emit(word)
        if isinstance(word, Stop):
            self.stop_for(word.reason)

    # --- what survives -----------------------------------------------------------------------------

    def record(self, record: dict[str, Any], frames: Frames = (), decoded: tuple[Tensor, Tensor] | None = None) -> None:
        """Have a record kept, and move on by it."""
        self.emit(Persist(record, frames))
        self.emit(*self._publish(self.book.take(record, frames, decoded)))

    def _publish(self, effects: list[Effect]) -> list[Effect]:
        if any(isinstance(effect, Published) for effect in effects):
            span = self.plan.span(self.state.version - 1)
            self.publisher.publish(self.state.version, self.learner.vector, self.learner.buffers, span)
        return effects

    def replay(self, record: dict[str, Any], frames: Frames) -> list[Effect]:
        """Move on by a record that was kept before a crash."""
        return self._publish(self.book.take(record, frames))

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot holds besides the learner."""
        return self.book.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.book.load_state_dict(dict(saved))
        self.members.known = self.state.seats
        self.publisher.publish(self.state.version, self.learner.vector, self.learner.buffers)

    def go_on_from(self, version: int, earlier: Mapping[str, Any]) -> None:
        """Continue another run at its version, with the data where that left it. What it counted and confirmed stays its own."""
        self.state.version = version
        state = earlier.get("state", {})
        self.state.positions, self.state.seats = dict(state.get("positions", {})), dict(state.get("seats", {}))
        self.members.known = self.state.seats

    def pending(self) -> list[tuple[dict[str, Any], Frames]]:
        """Records of contributions whose rounds are open: they belong to the journal that follows a snapshot."""
        return self.book.pending()
