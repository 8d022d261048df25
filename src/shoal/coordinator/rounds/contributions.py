"""Contributions as they arrive: which are accepted, and when their workers get the reply."""

from __future__ import annotations

from typing import Any

from shoal.coordinator.durable.receipt_seal import seal
from shoal.coordinator.effects import Reply
from shoal.coordinator.events import RequestReceived
from shoal.coordinator.members.lifecycle import MemberLifecycle
from shoal.coordinator.members.table import COMPUTING, JOINING, Member
from shoal.coordinator.rounds.plausibility import MOST_UNRECORDED, PlausibilityChecks
from shoal.coordinator.state import HeldReply, accepted_record
from shoal.coordinator.turn import NO_WEIGHTS, CoordinatorContext, Replies, Turn
from shoal.coordinator.units.leasing import UnitLeasing
from shoal.coordinator.units.tasks import TaskAssigner
from shoal.protocol.frames import UpdateError
from shoal.protocol.messages import Contribute
from shoal.updates.answer_frames import InexactAnswers, digest

LONGEST_WAIT_S = 5.0
"""Longest time that a reply is held back: a worker that waits longer may take the connection for lost."""
_MOST_DATA = 2**31
"""Bound on epochs of the data, and on batches of an epoch."""


class ContributionHandler:
    """Checks contributions, records those that are accepted, and replies to their senders: at once, or when a round has closed."""

    def __init__(
        self,
        context: CoordinatorContext,
        lifecycle: MemberLifecycle,
        checks: PlausibilityChecks,
        units: UnitLeasing | None,
        tasks: TaskAssigner | None,
        replies: Replies,
    ) -> None:
        self.plan, self.policies, self.replayed, self.members, self.completion = context
        self.rounds, self.lifecycle, self.checks = self.replayed.rounds, lifecycle, checks
        self.units, self.tasks, self.replies = units, tasks, replies

    def take(self, turn: Turn, event: RequestReceived, asked: Contribute, worker: Member) -> None:
        """Check a contribution; accept it, or say why not."""
        if asked.seq == turn.state.sequences.get(worker.name, -1):
            self.rounds.activate(worker.name)  # it has the weights that this was computed on
            return _reply_after_closing(turn, event.caller, asked, worker, repeated=True)
        if asked.base > turn.state.version or worker.name not in self.rounds.active:
            return turn.refuse(event.caller, "impossible", "an update of weights that were never sent")
        if asked.batches > self.checks.most_batches or max(asked.epoch, asked.position) >= _MOST_DATA:
            return turn.refuse(event.caller, "impossible", "more data than the run has for one contribution")
        if not self.checks.in_reach(asked, worker.seen_seq, worker.seen_place if self.tasks is None else None):
            return turn.refuse(event.caller, "misplaced", "a number, or a place at the data, that this worker cannot have come to")
        self._note_progress(turn, worker, asked)
        if (asked.unit >= 0) != (self.units is not None and not self.plan.leased_elsewhere):
            return turn.refuse(event.caller, "impossible", "not what this run's workers send")
        self.members.measure_rate(worker, turn.now, self.plan.telemetry_alpha)
        self.members.measure_pace(worker, asked.batches, turn.now, self.plan.telemetry_alpha)
        worker.lag = self._lag(turn, worker, asked.base)
        if worker.state == JOINING:
            worker.state = COMPUTING  # its first heartbeat since it has weights may come later
        return self._take_unit(turn, event, asked, worker) if asked.unit >= 0 else self._admit(turn, event, asked, worker)

    def _note_progress(self, turn: Turn, worker: Member, asked: Contribute) -> None:
        """Remember how far a worker has come, even if its contribution is rejected. After many rejections in a row this becomes a record: a
        restarted coordinator would otherwise refuse the worker's numbers."""
        worker.seen_seq, worker.seen_place = max(worker.seen_seq, asked.seq), max(worker.seen_place, (asked.epoch, asked.position))
        known = max(turn.state.sequences.get(worker.name, -1), turn.state.seen.get(worker.name, (-1,))[0])
        if worker.seen_seq - known > MOST_UNRECORDED:
            place = {"seat": worker.seat, "epoch": worker.seen_place[0], "position": worker.seen_place[1]}
            turn.record({"kind": "seen", "worker": worker.name, "seq": worker.seen_seq, **place})

    def _lag(self, turn: Turn, worker: Member, base: int) -> int:
        """Versions between the base of an update and now. A worker that steps its own weights has seen the versions that it made."""
        own = sum(version > base for version in turn.state.made.get(worker.name, ()))
        return max(0, turn.state.version - base - own)

    # --- accept or reject ----------------------------------------------------------------------------

    def _admit(self, turn: Turn, event: RequestReceived, asked: Contribute, worker: Member) -> None:
        share = self.policies.admission.share(worker.lag, self.members.speed(worker))
        problem = self._problem(turn, worker, asked) or ("stale" if share <= 0 else "")
        if problem:
            return self._reject(turn, event.caller, asked, worker, problem)
        number = self._round_for(turn, worker, asked)
        late = {"late": True} if self.policies.rounds.window > 0 and asked.round < number else {}
        try:
            decoded = self.replayed.decode(event.frames, number, worker.experts)
        except UpdateError as error:
            worker.reject("malformed")
            return turn.refuse(event.caller, "malformed", str(error))
        worker.accepted += 1
        plausible = self.checks.bounded(asked, worker.name)
        record = accepted_record(plausible, worker.name, worker.seat, asked.position, share, number, worker.experts)
        turn.record(record | late, event.frames, decoded)
        if self.tasks is not None:
            self.tasks.move_on(turn, worker, asked)
        return _reply_after_closing(turn, event.caller, asked, worker)

    def _take_unit(self, turn: Turn, event: RequestReceived, asked: Contribute, worker: Member) -> None:
        """Take the result of a unit that this coordinator leased out."""
        assert self.units is not None
        if self.completion.finished:
            return self._reject(turn, event.caller, asked, worker, "finished")
        try:
            outcome = self.units.submit(turn, worker, asked, event.frames)
        except InexactAnswers as error:
            return self._reject_inexact(turn, event, asked, worker, str(error))
        except UpdateError as error:
            turn.refuse(event.caller, "malformed", str(error))
            return self.lifecycle.count_failure(turn, worker, "what it sent cannot be used")
        if outcome != "accepted":
            return self._reject(turn, event.caller, asked, worker, outcome)
        worker.accepted += 1
        worker.failed = 0
        return _reply_after_closing(turn, event.caller, asked, worker)

    def _reject(self, turn: Turn, caller: Any, asked: Contribute, worker: Member, problem: str) -> None:
        worker.reject(problem)
        turn.state.count(problem)
        if self.tasks is not None:
            self.tasks.move_on(turn, worker, asked)
            if not self.tasks.has_piece(turn, worker):
                return turn.refuse(caller, "misplaced", "another worker does this part of the task, and no other part is free yet")
        return self._confirm(turn, caller, worker, asked.seq, problem, asked.have)

    def _reject_inexact(self, turn: Turn, event: RequestReceived, asked: Contribute, worker: Member, why: str) -> None:
        """Reject answers that were not computed as they should have been: in the ledger, in a warning, and to the worker."""
        fields = {"worker": worker.name, "seq": asked.seq, "unit": asked.unit, "base": asked.base, "reason": why}
        turn.record({"kind": "inexact", **fields, "digest": digest(event.frames)})
        turn.state.count("inexact")
        self.lifecycle.announce(turn, f"warning: unit {asked.unit} of {worker.name} is refused: {why}")
        self._confirm(turn, event.caller, worker, asked.seq, "inexact", asked.have)
        self.lifecycle.count_failure(turn, worker, why)

    def _problem(self, turn: Turn, worker: Member, asked: Contribute) -> str:
        """The status with which a contribution is rejected, whatever its lag; empty: none."""
        if self.completion.finished:
            return "finished"
        if self.tasks is not None and not self.tasks.is_assigned(worker, asked):
            return "moved"
        if asked.seq < turn.state.sequences.get(worker.name, -1) or _is_learned(turn, worker.seat, asked):
            return "overtaken"
        has_room = self._has_room_for(worker, self._round_for(turn, worker, asked))
        return self.policies.rounds.problem(asked.round, self._open_round(turn)) or ("" if has_room else "ahead")

    def _open_round(self, turn: Turn) -> int:
        """The round that takes contributions: at a relay whose last round is on its way up, the next one."""
        return turn.state.version + (self.replayed.relayed is not None)

    def _round_for(self, turn: Turn, worker: Member, asked: Contribute) -> int:
        """The round of a contribution. Holds: it is never before the round of the worker's last one, so they apply in their order."""
        number = self.policies.rounds.round_for(asked.round, self._open_round(turn))
        return max(number, self.rounds.newest_of(worker.name))

    def _has_room_for(self, worker: Member, number: int) -> bool:
        """Whether a round takes one more contribution of this worker."""
        return self.rounds.sent_by(worker.name, number) < self.policies.rounds.most_of_one

    # --- replies --------------------------------------------------------------------------------------

    def reply(self, turn: Turn) -> None:
        """Send the replies that are due at the end of a turn: those held back until now, and that of the accepted contribution."""
        if turn.release_held:
            for session, held in list(self.replies.held.items()):
                free = self._may_go_on(turn, held)
                if free or self.completion.finished:
                    self._send_held(turn, self.replies.held.pop(session), "accepted" if free else "finished")
        if turn.accepted is not None:
            self._send_or_hold(turn, turn.accepted)

    def _send_or_hold(self, turn: Turn, held: HeldReply) -> None:
        worker = held.worker
        if worker.session not in self.members.by_session:
            return turn.refuse(held.caller, "unknown-session")
        free = self._may_go_on(turn, held) and self._has_room_for(worker, turn.state.version)
        if free or self.completion.finished:
            return self._send_held(turn, held, "accepted")
        if (before := self.replies.held.pop(worker.session, None)) is not None:
            refuse_older_call(turn, before.caller)
        self.replies.held[worker.session] = held
        return None

    def _may_go_on(self, turn: Turn, held: HeldReply) -> bool:
        if turn.state.paused or (self.tasks is not None and not self.tasks.has_piece(turn, held.worker)):
            return False
        return self.policies.rounds.may_send_next(held.asked.round, turn.state.version)

    def reassure(self, turn: Turn) -> None:
        """Tell workers whose replies were held back for too long to ask again."""
        while self.replies.held:
            session, held = next(iter(self.replies.held.items()))
            if turn.now - held.since < LONGEST_WAIT_S:
                return
            self._send_held(turn, self.replies.held.pop(session), "wait")

    def _send_held(self, turn: Turn, held: HeldReply, status: str) -> None:
        have = held.asked.have if held.asked.have >= 0 and status != "wait" else NO_WEIGHTS
        self._confirm(turn, held.caller, held.worker, held.asked.seq, status, have, held.repeated)

    def _confirm(self, turn: Turn, caller: Any, worker: Member, seq: int, status: str, have: int, repeated: bool = False) -> None:
        """Send a receipt, sealed where the contribution was accepted."""
        state, key = turn.state, self.plan.receipt_key
        header = {"kind": "receipt", "status": status, "seq": seq, "round": state.version, "repeated": repeated}
        if status in ("accepted", "wait") and key and state.sequences.get(worker.name) == seq:
            digest = state.digests.get(worker.name, "")
            header |= {"digest": digest, "seal": seal(key, worker.name, seq, digest, state.version)}
        self.replies.send(turn, caller, header, worker, have)


def refuse_older_call(turn: Turn, caller: Any) -> None:
    """End a call whose worker has asked again since."""
    turn.emit(Reply(caller, {"kind": "refused", "reason": "asked-again", "detail": ""}))


def _reply_after_closing(turn: Turn, caller: Any, asked: Contribute, worker: Member, repeated: bool = False) -> None:
    """Reply at the end of the turn, when due rounds have closed: the reply then contains the weights that include this contribution."""
    turn.accepted = HeldReply(worker, caller, asked, turn.now, repeated)


def _is_learned(turn: Turn, seat: int, asked: Contribute) -> bool:
    """Whether these batches of a seat are in a contribution that was accepted before."""
    gone = turn.state.positions.get(str(seat))
    return gone is not None and (asked.epoch, asked.position - asked.batches) < (gone[0], gone[1])
