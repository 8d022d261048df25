"""How workers join and leave, and how silent, uninvited and failing ones are removed."""

from __future__ import annotations

from typing import Any

from shoal.coordinator.effects import Note, Reply
from shoal.coordinator.events import RequestReceived
from shoal.coordinator.members.authentication import NOTES_AT_ONCE, NOTES_PER_S, Authenticator, JoinRefusal, TokenBucket
from shoal.coordinator.members.table import Member
from shoal.coordinator.turn import CoordinatorContext, Replies, Turn
from shoal.coordinator.units.leasing import UnitLeasing
from shoal.coordinator.units.tasks import TaskAssigner
from shoal.errors import printable
from shoal.protocol.messages import PAUSED, PROTOCOL, Gone, Join

_LONGEST_PAUSE_REASON = 80
"""Characters of what a worker that pauses says, as in a database."""
_UNSEATED = -1


class MemberLifecycle:
    """Lets workers in, and removes them."""

    def __init__(
        self,
        context: CoordinatorContext,
        authenticator: Authenticator,
        units: UnitLeasing | None,
        tasks: TaskAssigner | None,
        replies: Replies,
    ) -> None:
        self.plan, self.policies, self.rounds, self.members = context.plan, context.policies, context.replayed.rounds, context.members
        self.authenticator, self.units, self.tasks, self.replies = authenticator, units, tasks, replies
        self._notes, self._unannounced = TokenBucket(NOTES_PER_S, NOTES_AT_ONCE), 0

    def restore(self, turn: Turn) -> None:
        """After a restart: quarantines begin anew, unused names are forgotten after a while."""
        self.authenticator.restore(turn.state, turn.now)
        for name, guest in turn.state.quarantined.items():
            self.members.quarantine(name, guest, turn.now + self.plan.bounds.quarantine_s)

    def tick(self, turn: Turn) -> None:
        """Remove silent and uninvited workers; end quarantines; forget unused names."""
        while (worker := self.members.next_silent(turn.now)) is not None:
            self.members.mark_lost(worker)
            self.remove(turn, worker, f"is taken for dead: silent for {turn.now - worker.seen_at:.0f} s")
        for guest in [guest for guest, workers in self.members.guests.items() if guest and workers]:
            if self.authenticator.check_guest(guest).reason:
                self.remove_guest(turn, guest)
        while (name := self.members.next_released(turn.now)) is not None:
            turn.record({"kind": "quarantined", "worker": name, "guest": "", "out": False})
        while (name := self.authenticator.next_unused_name(turn.state, turn.now)) is not None:
            turn.record({"kind": "forgotten", "worker": name})
            self.members.replaced.pop(name, None)
            if self.units is not None:
                self.units.leases.forget(name)

    # --- joining --------------------------------------------------------------------------------------

    def join(self, turn: Turn, event: RequestReceived, asked: Join) -> None:
        """Let in a worker that proves that it has its key. Its first request is answered with a challenge to sign."""
        if asked.protocol != PROTOCOL:
            versions = f"this worker's shoal speaks version {asked.protocol} of the protocol, and the coordinator's version {PROTOCOL}"
            return turn.refuse(event.caller, "protocol", f"another version: {versions}; install the same version of shoal on both")
        if not asked.proof:
            return turn.emit(Reply(event.caller, self.authenticator.challenge(event.session, turn.now)))
        challenge, refusal = self.authenticator.check_proof(asked, "join", None, turn.now, event.address)
        if refusal.reason:  # before the name: to find a free one takes long where a crowd has joined under similar names
            return turn.refuse(event.caller, *refusal)
        name = self.authenticator.name_for(asked, turn.state)
        before = self.members.by_name.get(name)
        refusal = self._check(turn, event, asked, name, challenge, before)
        if refusal.reason:
            return turn.refuse(event.caller, *refusal)
        returns = name in self.rounds.active and self.policies.contribution.takes_inner_steps  # it may have kept half of a long round
        if before is not None:
            if asked.instance != before.instance:
                self.members.mark_replaced(before)
            self.remove(turn, before, "came back", left=asked.instance == before.instance)
        if returns:
            self.rounds.returning.add(name)
        worker = self._add(turn, event, asked, name, challenge)
        self.replies.send(turn, event.caller, self._welcome(turn, worker), worker)
        if before is None:
            self._announce_join(turn, worker, asked.name)
        return None

    def _check(self, turn: Turn, event: RequestReceived, asked: Join, name: str, challenge: int, before: Member | None) -> JoinRefusal:
        refusal = self.authenticator.check_newer(challenge, before)
        if not refusal.reason:
            refusal = self.authenticator.check_admission(name, asked.key, event.guest, turn.state, turn.now, event.address)
        if not refusal.reason and self.tasks is not None and (unfit := self.tasks.why_unfit(name)):
            self.announce(turn, f"{name} cannot take part: {unfit}")
            refusal = JoinRefusal("unfit", unfit)
        if not refusal.reason and asked.instance in self.members.replaced.get(name, ()):
            return JoinRefusal("replaced", f"another worker called {name} has come; start this one with a --name of its own")
        return refusal

    def _add(self, turn: Turn, event: RequestReceived, asked: Join, name: str, challenge: int) -> Member:
        """Add a worker to the table and give it a seat. From now on its name belongs to its key."""
        about = {key: printable(value) for key, value in asked.about.items()}
        seat = None if self.tasks is None else self.tasks.seat_for(name)
        seat = _UNSEATED if self.tasks is not None and seat is None else seat
        worker = self.members.add(name, event.session, about, turn.now, asked.instance, event.guest, seat)
        worker.challenge, worker.address, worker.workers = challenge, event.address, min(asked.workers, self.plan.bounds.devices)
        self._restore_progress(turn, worker)
        if self.tasks is not None and worker.seat == _UNSEATED:
            self.tasks.on_join(turn, worker)
        if turn.state.seats.get(name) != worker.seat or turn.state.keys.get(name) != asked.key:
            turn.record({"kind": "seated", "worker": name, "seat": worker.seat, "key": asked.key})
        if name in turn.state.away:
            turn.record({"kind": "away", "worker": name, "why": ""})
        return worker

    def _restore_progress(self, turn: Turn, worker: Member) -> None:
        """Continue the counts of a worker that was here before. After too many failures it may try one more unit: it may be repaired."""
        state = turn.state
        seq, seat, *seen = state.seen.get(worker.name, (-1, worker.seat, 0, 0))
        epoch, position = max(state.positions.get(str(worker.seat), [0, 0]), seen if seat == worker.seat else [0, 0])
        worker.seen_seq = max(seq, state.sequences.get(worker.name, -1))
        worker.seen_place = epoch, position
        worker.failed = min(state.failures.get(worker.name, 0), self.plan.bounds.failures - 1)

    def _welcome(self, turn: Turn, worker: Member) -> dict[str, Any]:
        epoch, position = turn.state.positions.get(str(worker.seat), (0, 0))
        last = turn.state.sequences.get(worker.name, -1)
        known = {"name": worker.name, "session": worker.session, "seat": self.plan.data_seat(worker.seat)}
        return {"kind": "welcome", **known, "epoch": epoch, "position": position, "last_seq": last}

    def _announce_join(self, turn: Turn, worker: Member, wanted: str | None) -> None:
        text = f"{worker.name} joined ({', '.join(worker.about.values())})" if worker.about else f"{worker.name} joined"
        other = "" if wanted in (None, worker.name) else f": it asked for the name {wanted}, which belongs to another worker"
        self.announce(turn, text + other)

    def announce(self, turn: Turn, text: str) -> None:
        """Note for the user about a worker, within the rate limit."""
        if not self._notes.take(turn.now):
            self._unannounced += 1
            return
        if self._unannounced:
            turn.emit(Note(f"{self._unannounced} more workers came or went"))
            self._unannounced = 0
        turn.emit(Note(text))

    # --- leaving --------------------------------------------------------------------------------------

    def on_gone(self, turn: Turn, event: RequestReceived, asked: Gone) -> None:
        """Remove a worker whose processes have ended, as a sender with its key reports."""
        if not asked.proof:
            return turn.emit(Reply(event.caller, self.authenticator.challenge(event.session, turn.now)))
        before = self.members.by_name.get(asked.name)
        _, refusal = self.authenticator.check_proof(asked, "gone", before, turn.now, event.address)
        if not refusal.reason and turn.state.keys.get(asked.name) != asked.key:
            refusal = JoinRefusal("unproved", f"{asked.name} has another key")
        if refusal.reason:
            return turn.refuse(event.caller, *refusal)
        self.remove_by_name(turn, asked.name, "has lost a process, and starts again")
        return turn.emit(Reply(event.caller, {"kind": "goodbye"}))

    def leave(self, turn: Turn, worker: Member, reason: str) -> None:
        """A worker leaves by itself: for a while, if its computer's user needs it."""
        if reason.startswith(PAUSED):
            turn.record({"kind": "away", "worker": worker.name, "why": reason[:_LONGEST_PAUSE_REASON]})
            return self.remove(turn, worker, f"is {reason}", left=True)
        return self.remove(turn, worker, f"left: {reason}" if reason else "left", left=True)

    def remove_by_name(self, turn: Turn, name: str, why: str) -> None:
        if (worker := self.members.by_name.get(name)) is not None:
            self.remove(turn, worker, why)

    def remove(self, turn: Turn, worker: Member, why: str, left: bool = False) -> None:
        """End a worker's session. `left`: it said so itself, or comes back at once, so its units do not count as failed."""
        self.members.remove(worker)
        self.rounds.deactivate(worker.name)
        self.replies.publisher.forget(worker.session)
        held = self.replies.held.pop(worker.session, None)
        claim = self.units.forget(turn, worker, left) if self.units is not None else None
        for waiting in (held, claim):
            if waiting is not None:
                turn.refuse(waiting.caller, "unknown-session")
        self.authenticator.on_left(worker.name, turn.state, turn.now)
        self.announce(turn, f"{worker.name} {why}")

    def remove_guest(self, turn: Turn, guest: str) -> None:
        """Remove the workers of a person whose invitation was withdrawn. Contributions that were accepted from them stay."""
        theirs = [worker for worker in self.members.by_name.values() if worker.guest == guest]
        if not theirs:
            return
        turn.record({"kind": "withdrawn", "guest": guest, "workers": [worker.name for worker in theirs]})
        for worker in theirs:
            self.remove(turn, worker, f"is shown out: the invitation of {guest} was withdrawn", left=True)

    # --- failures -------------------------------------------------------------------------------------

    def blame(self, turn: Turn, name: str, reason: str) -> None:
        """Count a failure of a worker whose unit was taken away, and tell the worker with the reply to its next heartbeat."""
        if (worker := self.members.by_name.get(name)) is not None:
            worker.warning = f"the coordinator has given this worker's unit to another one: {reason}"
            self.count_failure(turn, worker, reason)

    def count_failure(self, turn: Turn, worker: Member, reason: str) -> None:
        """Count a failed unit. After too many in a row the worker goes into quarantine: it would use up the attempts of all units."""
        bounds = self.plan.bounds
        worker.reject("failed")
        worker.failed += 1
        turn.record({"kind": "blamed", "worker": worker.name, "failed": worker.failed})
        others = [one for one in self.members.by_name.values() if one is not worker and one.accepted and not one.failed]
        if worker.failed < bounds.failures or not others:
            return
        self.members.quarantine(worker.name, worker.guest, turn.now + bounds.quarantine_s)
        turn.record({"kind": "quarantined", "worker": worker.name, "guest": worker.guest, "out": True})
        guests = f", with newcomers on the invitation of {worker.guest}," if worker.guest else ""
        turn.emit(
            Note(
                f"warning: {worker.name} failed {worker.failed} units in a row that others manage, and is kept out{guests} for "
                f"{bounds.quarantine_s:.0f} s: {reason}"
            )
        )
        self.remove(turn, worker, "is in quarantine", left=True)
