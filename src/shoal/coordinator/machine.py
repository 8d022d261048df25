"""The coordinator: `handle(event, now) -> effects`. It opens nothing, reads no clock, starts no thread.

What changes the weights goes through `_take`: first it becomes a record, then the book takes the record. Nothing is confirmed before that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.coordinator.book import Book
from shoal.coordinator.closing import Closing
from shoal.coordinator.effects import Effect, Frames, Issue, Note, Persist, Published, Reply, Stop
from shoal.coordinator.membership import Membership, Worker
from shoal.coordinator.pacing import inner_steps
from shoal.coordinator.policies import Barrier, Policy, Quorum
from shoal.coordinator.publisher import Publisher
from shoal.coordinator.state import Called, Learner, Passed, Plan, State, Tick, Waiting, accepted, delivered
from shoal.coordinator.units import ISSUED_PER_QUORUM, LEAST_ISSUED
from shoal.updates import codecs, staleness
from shoal.updates.messages import PROTOCOL, Asked, Contribute, Delivered, Failed, Gone, Heartbeat, Join, Pull

__all__ = ["Called", "Coordinator", "Learner", "Passed", "Plan", "State", "Tick"]

LONGEST_WAIT_S = 5.0
"""An answer is never held back longer: a worker that hears nothing may then take the connection for lost."""
_MOST_RANKS = 64
"""Processes that a worker may be made of. Each takes batches of its own."""
_MOST_DATA = 2**31
"""No data has so many epochs, and no epoch so many batches."""
_NONE_WANTED = -2


class Coordinator:
    """Holds the weights and decides what enters them."""

    def __init__(self, plan: Plan, policy: Policy, learner: Learner) -> None:
        self.plan, self.policy, self.learner = plan, policy, learner
        self.book = Book(plan, policy, learner)
        self.rounds = self.book.rounds
        self.closing = Closing(plan, policy, self.book)
        self.members = Membership(plan.heartbeat_interval_s)
        self.members.known = self.state.seats
        self.publisher = Publisher(plan.updates.codec)
        self.publisher.publish(0, learner.vector, learner.buffers)
        self.waiting: OrderedDict[str, Waiting] = OrderedDict()
        """By session, longest first: who is answered when a round has closed."""
        self.stopped = ""
        self.refused: dict[str, int] = {}
        self.now = 0.0
        """Time as the coordinator sees it: it never goes back."""
        contributions = plan.expected if isinstance(policy.rounds, Barrier) else policy.rounds.contributions
        self.most_batches = _MOST_RANKS * max(1, plan.batches_per_step // max(1, contributions))
        """Batches that one contribution may be made of: a worker may have more devices than the others."""
        self._offered: list[int] = []
        self._spoiled: dict[int, int] = {}
        self._clock: float | None = None
        self._effects: list[Effect] = []

    # --- events ------------------------------------------------------------------------------------

    def handle(self, event: Called | Passed | Tick, now: float) -> list[Effect]:
        """What is to be done about an event. When the clock jumps back, time stands still for a moment and then goes on from there."""
        self._begin(now)
        if isinstance(event, Called):
            self._answer(event)
        elif isinstance(event, Passed):
            self._take_from_leases(event)
        else:
            self._evict_silent()
            self._reassure()
        if not (isinstance(event, Passed) and event.more):
            self._close_what_is_due()
            self._offer_more()
        self._watch_quorum()
        return self._effects

    @property
    def state(self) -> State:
        return self.book.state

    @property
    def finished(self) -> bool:
        total = self.plan.total_batches
        if self.closing.all_settled and self.rounds.workers(self.state.version) < self.plan.needed:
            return True  # what is left, if anything, will never be enough
        return bool(self.stopped) or (self.state.version >= self.plan.total_steps if total is None else self.state.batches >= total)

    @property
    def step(self) -> float:
        """Where the schedule stands: updates made, or what the batches so far are worth."""
        return self.book.step

    def stop(self, reason: str) -> list[Effect]:
        """End the run: who asks from now on is told so, and who waits too. Open rounds stay open, for a run that goes on later."""
        self._effects = []
        self.stopped = reason
        self._release()
        return self._effects

    def conclude(self) -> list[Effect]:
        """The run is over: what waits in rounds that will not close is written off, by name."""
        return self.book.write_off()

    def _begin(self, now: float) -> None:
        self.now += max(0.0, now - (now if self._clock is None else self._clock))
        self._clock, self._effects = now, []

    def _answer(self, event: Called) -> None:
        asked = event.asked
        if isinstance(asked, Join):
            return self._join(event, asked)
        if isinstance(asked, Gone):
            self._lose(asked.name, "has lost a process, and starts again")
            return self._effects.append(Reply(event.caller, {"kind": "goodbye"}))
        worker = self.members.by_session.get(asked.session)
        if worker is None:
            return self._refuse(event.caller, "unknown-session")
        if not self._is_new(worker, asked.number, isinstance(asked, Heartbeat)):
            return self._refuse(event.caller, "replayed")
        self.members.hear(worker, self.now)
        self.rounds.hear(worker.name)
        return self._answer_member(event, asked, worker)

    def _is_new(self, worker: Worker, number: int, beats: bool) -> bool:
        if number <= worker.numbers[beats]:
            return False
        worker.numbers[beats] = number
        return True

    def _answer_member(self, event: Called, asked: Asked, worker: Worker) -> None:
        if isinstance(asked, Contribute):
            worker.received_bytes += sum(len(frame) for frame in event.frames)
            self._contribute(event, asked, worker)
        elif isinstance(asked, Pull):
            self.rounds.activate(worker.name)
            self._reply(event.caller, {"kind": "weights"}, worker, asked.have)
        elif isinstance(asked, Heartbeat):
            worker.state = _printable(asked.state)
            self._reply(event.caller, {"kind": "pulse"}, worker)
        else:
            self._remove(worker, "left")
            self._reply(event.caller, {"kind": "goodbye"}, worker)

    def _refuse(self, caller: Any, reason: str, detail: str = "") -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self._effects.append(Reply(caller, {"kind": "refused", "reason": reason, "detail": detail}))

    def _reply(self, caller: Any, header: dict[str, Any], worker: Worker, have: int = _NONE_WANTED) -> None:
        """Answer, with weights for one who has version `have`."""
        fields, frames = self.publisher.since(worker.session, have) if have > _NONE_WANTED else ({}, ())
        most_lag = self.policy.most_lag(self.members.speed(worker))
        common = {"version": self.state.version, "step": self.step, "done": self.finished, "most_lag": most_lag}
        if self.policy.inner is not None and have > _NONE_WANTED:
            worker.began_at = self.now
            common["inner_steps"] = inner_steps(self.policy, self.plan, self.state.version, worker, self.members, self.now)
        self._effects.append(Reply(caller, header | common | fields, frames))

    # --- members -----------------------------------------------------------------------------------

    def _join(self, event: Called, asked: Join) -> None:
        if asked.protocol != PROTOCOL:
            return self._refuse(event.caller, "protocol", f"the coordinator speaks version {PROTOCOL}: install the same version of shoal")
        name = asked.name or self.members.free_name()
        if not self.members.has_room_for(name):
            return self._refuse(event.caller, "full", "the coordinator has as many workers as it can take")
        if asked.instance in self.members.replaced.get(name, ()):
            return self._refuse(event.caller, "replaced", f"another worker called {name} has come; start this one with a --name of its own")
        before = self.members.by_name.get(name)
        if before is not None:
            if asked.instance != before.instance:
                self.members.replace(before)
            self._remove(before, "came back")
        about = {key: _printable(value) for key, value in asked.about.items()}
        worker = self.members.add(name, event.session, about, self.now, asked.instance)
        if self.state.seats.get(name) != worker.seat:
            self._take({"kind": "seated", "worker": name, "seat": worker.seat})
        self._reply(event.caller, self._welcome(worker), worker)
        if before is None:
            self._effects.append(Note(f"{name} joined ({', '.join(about.values())})" if about else f"{name} joined"))

    def _welcome(self, worker: Worker) -> dict[str, Any]:
        epoch, position = self.state.positions.get(str(worker.seat), (0, 0))
        last = self.state.sequences.get(worker.name, -1)
        known = {"name": worker.name, "session": worker.session, "seat": worker.seat}
        return {"kind": "welcome", **known, "epoch": epoch, "position": position, "last_seq": last}

    def _remove(self, worker: Worker, why: str) -> None:
        self.members.remove(worker)
        self.rounds.deactivate(worker.name)
        self.publisher.forget(worker.session)
        waited = self.waiting.pop(worker.session, None)
        if waited is not None:
            self._refuse(waited.caller, "unknown-session")
        self._effects.append(Note(f"{worker.name} {why}"))

    def lost(self, name: str, now: float) -> list[Effect]:
        """Somebody who knows says that a worker is gone: nobody waits for it until it comes back."""
        self._begin(now)
        self._lose(name, "is gone")
        return self._effects

    def _lose(self, name: str, why: str) -> None:
        if (worker := self.members.by_name.get(name)) is not None:
            self._remove(worker, why)
            self._close_what_is_due()

    def _evict_silent(self) -> None:
        while (worker := self.members.silent(self.now)) is not None:
            self._remove(worker, f"is taken for dead: silent for {self.now - worker.seen_at:.0f} s")

    # --- contributions -----------------------------------------------------------------------------

    def _contribute(self, event: Called, asked: Contribute, worker: Worker) -> None:
        if asked.seq == self.state.sequences.get(worker.name, -1):
            self.rounds.activate(worker.name)  # it has the weights that this was computed on
            return self._receipt(event.caller, worker, asked, "accepted", repeated=True)
        if asked.base > self.state.version or worker.name not in self.rounds.active:
            return self._refuse(event.caller, "impossible", "an update of weights that were never sent")
        if asked.batches > self.most_batches or max(asked.epoch, asked.position) >= _MOST_DATA:
            return self._refuse(event.caller, "impossible", "more data than the run has for one contribution")
        self.members.arrive(worker, self.now, self.plan.telemetry_alpha)
        self.members.time(worker, asked.batches, self.now, self.plan.telemetry_alpha)
        worker.lag = self._lag(worker, asked.base)
        share = self.policy.admission(worker.lag, self.members.speed(worker))
        problem = self._problem(worker, asked) or ("stale" if share <= 0 else "")
        if problem:
            worker.rejected += 1
            self.state.count(problem)
            return self._receipt(event.caller, worker, asked, problem)
        return self._accept(event, asked, worker, share)

    def _accept(self, event: Called, asked: Contribute, worker: Worker, share: float) -> None:
        number = max(asked.round, self.state.version) if isinstance(self.policy.rounds, Barrier) else self.state.version
        late = isinstance(self.policy.rounds, Barrier) and asked.round < number
        try:
            decoded = self.book.decode(event.frames, number)
        except codecs.UpdateError as error:
            worker.rejected += 1
            return self._refuse(event.caller, "malformed", str(error))
        worker.accepted += 1
        self._take(accepted(worker.name, worker.seat, asked, share, number, late), event.frames, decoded)
        self._close_what_is_due()  # the answer then brings the weights that this contribution moved
        return self._receipt(event.caller, worker, asked, "accepted")

    def _lag(self, worker: Worker, base: int) -> int:
        """Versions that the update does not know of. A worker that steps its own weights knows those it made itself."""
        own = sum(1 for version in self.state.made.get(worker.name, ()) if version > base) if self.policy.worker_steps else 0
        return max(0, self.state.version - base - own)

    def _problem(self, worker: Worker, asked: Contribute) -> str:
        """Why a contribution cannot be taken, however fresh it is."""
        if self.finished:
            return "finished"
        if asked.seq < self.state.sequences.get(worker.name, -1) or self._is_learned(worker.seat, asked):
            return "overtaken"
        rounds = self.policy.rounds
        if not isinstance(rounds, Barrier):
            return ""
        if asked.round < self.state.version and not rounds.late_count:
            return "late"
        return "ahead" if asked.round >= self.state.version + rounds.window else ""

    def _is_learned(self, seat: int, asked: Contribute) -> bool:
        """Whether somebody in this seat has sent what was learned from these batches already."""
        gone = self.state.positions.get(str(seat))
        return gone is not None and (asked.epoch, asked.position - asked.batches) < (gone[0], gone[1])

    def _receipt(self, caller: Any, worker: Worker, asked: Contribute, status: str, repeated: bool = False) -> None:
        """Answer at once, or when the round has closed if the worker may not go on before."""
        if status == "accepted" and not self._is_free(asked.round) and not self.finished:
            before = self.waiting.pop(worker.session, None)
            if before is not None:  # the worker asked again: nobody waits for the first answer any more
                self._effects.append(Reply(before.caller, {"kind": "refused", "reason": "asked-again", "detail": ""}))
            self.waiting[worker.session] = Waiting(caller, asked.seq, asked.have, asked.round, self.now)
            return
        have = asked.have if asked.have >= 0 or status != "accepted" else _NONE_WANTED
        self._confirm(caller, worker, asked.seq, status, have, repeated)

    def _confirm(self, caller: Any, worker: Worker, seq: int, status: str, have: int, repeated: bool = False) -> None:
        header = {"kind": "receipt", "status": status, "seq": seq, "round": self.state.version, "repeated": repeated}
        self._reply(caller, header, worker, have)

    def _is_free(self, number: int) -> bool:
        """Whether one who has sent to this round may send to the next."""
        return not isinstance(self.policy.rounds, Barrier) or number + 1 < self.state.version + self.policy.rounds.window

    def _release(self) -> None:
        """Answer those who waited for a round that has closed by now."""
        for session, waited in list(self.waiting.items()):
            free = self._is_free(waited.round)
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
        have = waited.have if waited.have >= 0 and status != "wait" else _NONE_WANTED
        self._confirm(waited.caller, self.members.by_session[session], waited.seq, status, have)

    # --- units -------------------------------------------------------------------------------------

    def offer(self) -> Issue:
        """The units that are to be done next, for the version there is now."""
        cut, rounds = self.plan.cut, self.policy.rounds
        assert cut is not None
        assert isinstance(rounds, Quorum)
        most = 0 if self.finished else max(LEAST_ISSUED, ISSUED_PER_QUORUM * rounds.contributions)
        self._offered = list(self.book.settled.open(cut.total, most))
        return Issue(self.state.version, self._offered)

    def _offer_more(self) -> None:
        """All units on offer are settled, and the round is still open: units were given up, or the rule needs results of more workers."""
        if not self._offered or self.finished or not all(unit in self.book.settled for unit in self._offered):
            return None
        needed, there = self.plan.needed, self.rounds.workers(self.state.version)
        if there < needed:
            text = f"{self.plan.updates.aggregation.kind} needs results of {needed} workers, and {there} have handed in"
            if self.plan.updates.below_quorum == "stop" and self.state.version > 0:
                self.stopped = f"{text}: stopped, as updates.below_quorum says"
                return self._effects.append(Stop(self.stopped))
            self._effects.append(Note(f"{text}: waiting for {needed - there} more"))
        return self._effects.append(self.offer())

    def _take_from_leases(self, event: Passed) -> None:
        cut, asked = self.plan.cut, event.asked
        assert cut is not None
        number = cut.number(asked.epoch, asked.start)
        if number in self.book.settled:
            return self.state.count("repeated")
        if isinstance(asked, Failed):
            return self._give_up(asked, number)
        return self._deliver(asked, event.frames, number)

    def spoil(self, epoch: int, start: int, why: str) -> list[Effect]:
        """What was handed in for a unit cannot be used: it is done again, unless that happened too often."""
        self._effects = []
        self._spoil(epoch, start, why)
        self._close_what_is_due()
        self._offer_more()
        return self._effects

    def _spoil(self, epoch: int, start: int, why: str) -> None:
        cut, rounds = self.plan.cut, self.policy.rounds
        assert cut is not None
        assert isinstance(rounds, Quorum)
        number = cut.number(epoch, start)
        self.state.count("malformed")
        self._spoiled[number] = self._spoiled.get(number, 0) + 1
        if self._spoiled[number] > rounds.max_retries:
            return self._give_up(Failed(*cut.unit(number), why), number)
        self._effects += [Note(f"warning: {_printable(why)}"), Issue(self.state.version, [number])]
        return None

    def _give_up(self, asked: Failed, number: int) -> None:
        self._spoiled.pop(number, None)
        fields = {name: getattr(asked, name) for name in ("epoch", "start", "batches", "reason")}
        self._take({"kind": "failed", "unit": number, **fields})
        self._effects.append(Note(f"warning: unit {number} of epoch {asked.epoch + 1} is given up: {_printable(asked.reason)}"))

    def _deliver(self, asked: Delivered, frames: Frames, number: int) -> None:
        """Take what was learned from a unit. Its worker was told so already: one that came while a round closed is in the next."""
        try:
            decoded = self.book.decode(frames)
        except codecs.UpdateError as error:
            return self._spoil(asked.epoch, asked.start, f"what {asked.worker} sent cannot be used: {error}")
        share = staleness.weight(max(0, self.state.version - asked.base))
        self._spoiled.pop(number, None)
        self._take(delivered(asked, number, share, self.state.version), frames, decoded)
        return None

    # --- rounds ------------------------------------------------------------------------------------

    def _close_what_is_due(self) -> None:
        while not self.finished and self.closing.due(self.state.version, self.now):
            number = self.state.version
            held = sorted(self.rounds.open[number].held.values(), key=lambda one: (one.record["worker"], one.record["seq"]))
            if isinstance(self.policy.rounds, Barrier):
                self.rounds.miss(number)
            self._take({"kind": "closed", "round": number, "workers": [one.key for one in held]})
            if self.plan.cut is not None:
                self._effects.append(self.offer())
            self._release()

    def _watch_quorum(self) -> None:
        told = None if self.finished or self.plan.cut is not None else self.closing.watch(self.state.version, self.now)
        if told is not None:
            self._effects.append(told)
        if isinstance(told, Stop):
            self.stopped = told.reason
            self._release()

    # --- what survives -----------------------------------------------------------------------------

    def _take(self, record: dict[str, Any], frames: Frames = (), decoded: tuple[Tensor, Tensor] | None = None) -> None:
        self._effects.append(Persist(record, frames))
        self._effects += self._taken(self.book.take(record, frames, decoded))

    def _taken(self, effects: list[Effect]) -> list[Effect]:
        if any(isinstance(effect, Published) for effect in effects):
            span = self.plan.span(self.state.version - 1)
            self.publisher.publish(self.state.version, self.learner.vector, self.learner.buffers, span)
        return effects

    def replay(self, record: dict[str, Any], frames: Frames) -> list[Effect]:
        """Take a record again that was kept before a crash."""
        return self._taken(self.book.take(record, frames))

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
        return self.rounds.pending()


def _printable(text: str) -> str:
    """What strangers say of themselves is shown to people, and must not steer their terminals."""
    return "".join(character if character.isprintable() else "?" for character in text)
