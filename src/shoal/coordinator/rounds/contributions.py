"""Contributions as they arrive: which are taken, and what their workers are told, at once or when the round has closed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from torch import Tensor

from shoal.coordinator.durable.receipt_seal import seal
from shoal.coordinator.durable.replayed_state import ReplayedState
from shoal.coordinator.effects import Effect, Frames, Reply
from shoal.coordinator.members.lifecycle import MemberLifecycle
from shoal.coordinator.members.table import Member, MemberTable
from shoal.coordinator.policies import CoordinatorPolicies
from shoal.coordinator.rounds.open_rounds import Rounds
from shoal.coordinator.rounds.plausibility import MOST_UNRECORDED, PlausibilityChecks
from shoal.coordinator.state import HeldReply, RequestReceived, RunPlan, State, accepted
from shoal.coordinator.units.leasing import UnitLeasing
from shoal.coordinator.units.tasks import TaskAssigner
from shoal.protocol.frames import UpdateError
from shoal.protocol.messages import Contribute
from shoal.updates.answer_frames import InexactAnswers, digest

LONGEST_WAIT_S = 5.0
"""An answer is never held back longer: a worker that hears nothing may then take the connection for lost."""
NO_WEIGHTS = -2
"""In place of the version that a worker has: its answer brings no weights."""
_MOST_DATA = 2**31
"""No data has so many epochs, and no epoch so many batches."""


class Host(Protocol):
    """The coordinator that contributions are for."""

    plan: RunPlan
    policies: CoordinatorPolicies
    book: ReplayedState
    rounds: Rounds
    members: MemberTable
    attendance: MemberLifecycle
    claims: PlausibilityChecks
    lender: UnitLeasing | None
    tasks: TaskAssigner | None
    waiting: OrderedDict[str, HeldReply]
    now: float

    @property
    def state(self) -> State: ...
    @property
    def finished(self) -> bool: ...
    def emit(self, *effects: Effect) -> None: ...
    def record(self, record: dict[str, Any], frames: Frames = (), decoded: tuple[Tensor, Tensor] | None = None) -> None: ...
    def refuse(self, caller: Any, reason: str, detail: str = "") -> None: ...
    def answer(self, caller: Any, header: dict[str, Any], worker: Member, have: int) -> None: ...
    def close_what_is_due(self) -> None: ...


class ContributionHandler:
    """Judges contributions, and answers those who sent them."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def take(self, event: RequestReceived, asked: Contribute, worker: Member) -> None:
        """Judge a contribution, and answer it."""
        host = self.host
        if asked.seq == host.state.sequences.get(worker.name, -1):
            host.rounds.activate(worker.name)  # it has the weights that this was computed on
            return self._receipt(event.caller, worker, asked, "accepted", repeated=True)
        if asked.base > host.state.version or worker.name not in host.rounds.active:
            return host.refuse(event.caller, "impossible", "an update of weights that were never sent")
        if asked.batches > host.claims.most_batches or max(asked.epoch, asked.position) >= _MOST_DATA:
            return host.refuse(event.caller, "impossible", "more data than the run has for one contribution")
        if not host.claims.in_reach(asked, worker.seen_seq, worker.seen_place if host.tasks is None else None):
            return host.refuse(event.caller, "misplaced", "a number, or a place at the data, that this worker cannot have come to")
        self._see(worker, asked)
        if (asked.unit >= 0) != (host.lender is not None and host.lender.leases is not None):
            return host.refuse(event.caller, "impossible", "not what this run's workers send")
        host.members.arrive(worker, host.now, host.plan.telemetry_alpha)
        host.members.time(worker, asked.batches, host.now, host.plan.telemetry_alpha)
        worker.lag = self._lag(worker, asked.base)
        return self._submit(event, asked, worker) if asked.unit >= 0 else self._admit(event, asked, worker)

    def _see(self, worker: Member, asked: Contribute) -> None:
        """Note how far a worker has come, whatever becomes of what it sends. Where much is turned away, that survives a crash, too: else
        the worker would come back with numbers that it cannot have come to."""
        host = self.host
        worker.seen_seq, worker.seen_place = max(worker.seen_seq, asked.seq), max(worker.seen_place, (asked.epoch, asked.position))
        known = max(host.state.sequences.get(worker.name, -1), host.state.seen.get(worker.name, (-1,))[0])
        if worker.seen_seq - known > MOST_UNRECORDED:
            place = {"seat": worker.seat, "epoch": worker.seen_place[0], "position": worker.seen_place[1]}
            host.record({"kind": "seen", "worker": worker.name, "seq": worker.seen_seq, **place})

    def _move_on(self, worker: Member, asked: Contribute) -> None:
        if self.host.tasks is not None:
            self.host.tasks.move_on(worker, asked)

    def _admit(self, event: RequestReceived, asked: Contribute, worker: Member) -> None:
        share = self.host.policies.admission.share(worker.lag, self.host.members.speed(worker))
        problem = self._problem(worker, asked) or ("stale" if share <= 0 else "")
        if problem:
            return self._turn_away(event.caller, asked, worker, problem)
        return self._accept(event, asked, worker, share)

    def _turn_away(self, caller: Any, asked: Contribute, worker: Member, problem: str) -> None:
        worker.reject(problem)
        self.host.state.count(problem)
        self._move_on(worker, asked)
        self._receipt(caller, worker, asked, problem)

    def _accept(self, event: RequestReceived, asked: Contribute, worker: Member, share: float) -> None:
        host = self.host
        number = self._round_for(worker, asked)
        late = host.policies.rounds.window > 0 and asked.round < number
        try:
            decoded = host.book.decode(event.frames, number, worker.experts)
        except UpdateError as error:
            worker.reject("malformed")
            return host.refuse(event.caller, "malformed", str(error))
        worker.accepted += 1
        made = accepted(worker.name, worker.seat, host.claims.believed(asked, worker.name), share, number, late, worker.experts)
        host.record(made, event.frames, decoded)
        self._move_on(worker, asked)
        host.close_what_is_due()  # the answer then brings the weights that this contribution moved
        return self._receipt(event.caller, worker, asked, "accepted")

    def _submit(self, event: RequestReceived, asked: Contribute, worker: Member) -> None:
        """Take a unit's result, where the coordinator keeps the leases."""
        host = self.host
        assert host.lender is not None
        if host.finished:
            return self._turn_away(event.caller, asked, worker, "finished")
        try:
            outcome = host.lender.submit(worker, asked, event.frames)
        except InexactAnswers as error:
            return self._tell_inexact(event, asked, worker, str(error))
        except UpdateError as error:
            host.refuse(event.caller, "malformed", str(error))
            return host.attendance.count_failure(worker, "what it sent cannot be used")
        if outcome != "accepted":
            return self._turn_away(event.caller, asked, worker, outcome)
        worker.accepted += 1
        worker.failed = 0
        host.close_what_is_due()
        return self._receipt(event.caller, worker, asked, "accepted")

    def _tell_inexact(self, event: RequestReceived, asked: Contribute, worker: Member, why: str) -> None:
        """Name a worker whose answers are not what they should be: in the ledger, to people, and to itself."""
        host = self.host
        fields = {"worker": worker.name, "seq": asked.seq, "unit": asked.unit, "base": asked.base, "reason": why}
        host.record({"kind": "inexact", **fields, "digest": digest(event.frames)})
        host.state.count("inexact")
        host.attendance.tell(f"warning: unit {asked.unit} of {worker.name} is refused: {why}")
        self._receipt(event.caller, worker, asked, "inexact")
        host.attendance.count_failure(worker, why)

    def _lag(self, worker: Member, base: int) -> int:
        """Versions that the update does not know of. A worker that steps its own weights knows those it made itself."""
        host = self.host
        own_steps = host.policies.contribution.own_steps
        own = sum(1 for version in host.state.made.get(worker.name, ()) if version > base) if own_steps else 0
        return max(0, host.state.version - base - own)

    def _problem(self, worker: Member, asked: Contribute) -> str:
        """Why a contribution cannot be taken, however fresh it is."""
        host = self.host
        if host.finished:
            return "finished"
        if host.tasks is not None and not host.tasks.is_at(worker, asked):
            return "moved"
        if asked.seq < host.state.sequences.get(worker.name, -1) or self._is_learned(worker.seat, asked):
            return "overtaken"
        rounds, version = host.policies.rounds, self._open_round
        has_room = self._has_room_for(worker, self._round_for(worker, asked))
        return rounds.problem(asked.round, version) or ("" if has_room else "ahead")

    @property
    def _open_round(self) -> int:
        """The round that takes contributions. While that of a relay is on its way up, it is the next one."""
        return self.host.state.version + (self.host.book.upward is not None)

    def _round_for(self, worker: Member, asked: Contribute) -> int:
        """The round that a contribution goes into: never one before that of the worker's last one, which an earlier life of it may have
        sent ahead. So what a worker makes is in the weights in the order in which it was made."""
        return max(self.host.policies.rounds.round_for(asked.round, self._open_round), self.host.rounds.newest_of(worker.name))

    def _has_room_for(self, worker: Member, number: int) -> bool:
        """Whether a round takes one more contribution of this worker."""
        return self.host.rounds.sent_by(worker.name, number) < self.host.policies.rounds.most_of_one

    def _is_learned(self, seat: int, asked: Contribute) -> bool:
        """Whether a worker in this seat has sent already what was learned from these batches."""
        gone = self.host.state.positions.get(str(seat))
        return gone is not None and (asked.epoch, asked.position - asked.batches) < (gone[0], gone[1])

    def _receipt(self, caller: Any, worker: Member, asked: Contribute, status: str, repeated: bool = False) -> None:
        """Answer at once, or when the round has closed if the worker may not go on before. Nobody goes on while the run is paused."""
        host = self.host
        free = not host.state.paused and host.policies.rounds.may_send_next(asked.round, host.state.version)
        free = free and self._has_room_for(worker, host.state.version)
        if status == "accepted" and not free and not host.finished:
            before = host.waiting.pop(worker.session, None)
            self.answer_no_longer(None if before is None else before.caller)
            host.waiting[worker.session] = HeldReply(caller, asked.seq, asked.have, asked.round, host.now)
            return
        have = asked.have if asked.have >= 0 or status != "accepted" else NO_WEIGHTS
        self._confirm(caller, worker, asked.seq, status, have, repeated)

    def _confirm(self, caller: Any, worker: Member, seq: int, status: str, have: int, repeated: bool = False) -> None:
        host = self.host
        header = {"kind": "receipt", "status": status, "seq": seq, "round": host.state.version, "repeated": repeated}
        if status in ("accepted", "wait") and host.plan.receipt_key and host.state.sequences.get(worker.name) == seq:
            digest = host.state.digests.get(worker.name, "")
            header |= {"digest": digest, "seal": seal(host.plan.receipt_key, worker.name, seq, digest, host.state.version)}
        host.answer(caller, header, worker, have)

    def release(self) -> None:
        """Answer those who waited for a round that has closed by now."""
        host = self.host
        for session, waited in list(host.waiting.items()):
            free = not host.state.paused and host.policies.rounds.may_send_next(waited.round, host.state.version)
            if free or host.finished:
                self._answer_waiting(session, "accepted" if free else "finished")

    def reassure(self) -> None:
        """Tell those who have waited long to ask again."""
        host = self.host
        while host.waiting:
            session, waited = next(iter(host.waiting.items()))
            if host.now - waited.since < LONGEST_WAIT_S:
                return
            self._answer_waiting(session, "wait")

    def _answer_waiting(self, session: str, status: str) -> None:
        waited = self.host.waiting.pop(session)
        have = waited.have if waited.have >= 0 and status != "wait" else NO_WEIGHTS
        self._confirm(waited.caller, self.host.members.by_session[session], waited.seq, status, have)

    def answer_no_longer(self, caller: Any) -> None:
        """The worker asked again: nothing comes of its first question."""
        if caller is not None:
            self.host.emit(Reply(caller, {"kind": "refused", "reason": "asked-again", "detail": ""}))
