"""Who takes part: who joins, leaves, is taken for dead, is shown out, or is kept out for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Protocol

from shoal.coordinator.effects import Effect, Note, Reply
from shoal.coordinator.members.authentication import Authenticator, JoinRefusal, TokenBucket
from shoal.coordinator.members.table import Member, MemberTable
from shoal.coordinator.policies import CoordinatorPolicies
from shoal.coordinator.rounds.open_rounds import Rounds
from shoal.coordinator.rounds.weights_publisher import SubsetPublisher
from shoal.coordinator.state import HeldReply, RequestReceived, RunPlan, State
from shoal.coordinator.units.leasing import UnitLeasing
from shoal.coordinator.units.tasks import TaskAssigner
from shoal.errors import printable
from shoal.protocol.messages import PROTOCOL, Gone, Join

_UNSEATED = -1
_NOTES_PER_S, _NOTES_AT_ONCE = 1.0, 200.0
"""Comings and goings that people are told of; those beyond it are counted."""


class Host(Protocol):
    """The coordinator whose workers come and go."""

    plan: RunPlan
    policies: CoordinatorPolicies
    members: MemberTable
    door: Authenticator
    rounds: Rounds
    parts: SubsetPublisher
    lender: UnitLeasing | None
    tasks: TaskAssigner | None
    waiting: OrderedDict[str, HeldReply]
    now: float

    @property
    def state(self) -> State: ...
    def emit(self, *effects: Effect) -> None: ...
    def record(self, record: dict[str, Any]) -> None: ...
    def refuse(self, caller: Any, reason: str, detail: str = "") -> None: ...
    def lose(self, name: str, why: str) -> None: ...
    def answer(self, caller: Any, header: dict[str, Any], worker: Member) -> None: ...


class MemberLifecycle:
    """Lets workers in, and sees them off."""

    def __init__(self, host: Host) -> None:
        self.host, self.members, self.door = host, host.members, host.door
        self._notes, self._untold = TokenBucket(_NOTES_PER_S, _NOTES_AT_ONCE), 0

    def recall(self) -> None:
        """A coordinator that comes back knows who is kept out."""
        host = self.host
        self.door.recall(host.state, host.now)
        for name, guest in host.state.quarantined.items():
            self.members.quarantine(name, guest, host.now + host.plan.bounds.quarantine_s)

    def look_around(self) -> None:
        """See off who is silent, or is welcome no longer; forget names that nobody uses."""
        self._evict_silent()
        self._evict_uninvited()
        self._forget_unused()

    def join(self, event: RequestReceived, asked: Join) -> None:
        """Let a worker in that proves to have its key. What it asked for first is answered with what to sign."""
        host = self.host
        if asked.protocol != PROTOCOL:
            return host.refuse(event.caller, "protocol", f"the coordinator speaks version {PROTOCOL}: install the same version of shoal")
        if not asked.proof:
            return host.emit(Reply(event.caller, self.door.challenge(event.session, host.now)))
        challenge, refusal = self.door.check(asked, "join", None, host.now, event.address)
        if refusal.reason:  # before the name: to find one that is free may take long where a crowd has come under names like it
            return host.refuse(event.caller, *refusal)
        name = self.door.name_for(asked, host.state)
        before = self.members.by_name.get(name)
        refusal = self.door.compare(challenge, before)
        if not refusal.reason:
            refusal = self.door.admit(name, asked.key, event.guest, host.state, host.now, event.address)
        if not refusal.reason and host.tasks is not None and (unfit := host.tasks.unfit(name)):
            self.tell(f"{name} cannot take part: {unfit}")
            refusal = JoinRefusal("unfit", unfit)
        if refusal.reason:
            return host.refuse(event.caller, *refusal)
        if asked.instance in self.members.replaced.get(name, ()):
            return host.refuse(event.caller, "replaced", f"another worker called {name} has come; start this one with a --name of its own")
        returns = name in host.rounds.active and host.policies.contribution.takes_inner_steps  # it may have kept half of a long round
        if before is not None:
            if asked.instance != before.instance:
                self.members.replace(before)
            self.remove(before, "came back", left=asked.instance == before.instance)
        if returns:
            host.rounds.returning.add(name)
        worker = self._seat(event, asked, name, challenge)
        host.answer(event.caller, self._welcome(worker), worker)
        if before is None:
            self._tell_of_joining(worker, asked.name)
        return None

    def _seat(self, event: RequestReceived, asked: Join, name: str, challenge: int) -> Member:
        """Give a worker its place. Its name and its key belong together from now on."""
        host = self.host
        about = {key: printable(value) for key, value in asked.about.items()}
        seat = None if host.tasks is None else host.tasks.seat_for(name)
        seat = _UNSEATED if host.tasks is not None and seat is None else seat
        worker = self.members.add(name, event.session, about, host.now, asked.instance, event.guest, seat)
        worker.challenge, worker.address = challenge, event.address
        self._recall(worker)
        if host.tasks is not None and worker.seat == _UNSEATED:
            host.tasks.seat(worker)
        if host.state.seats.get(name) != worker.seat or host.state.keys.get(name) != asked.key:
            host.record({"kind": "seated", "worker": name, "seat": worker.seat, "key": asked.key})
        return worker

    def _recall(self, worker: Member) -> None:
        """How a worker stands that may have been here before, with this coordinator or one that was killed. After too many failures it may
        try one more unit: whoever started it again may have mended it."""
        host = self.host
        seq, seat, *seen = host.state.seen.get(worker.name, (-1, worker.seat, 0, 0))
        epoch, position = max(host.state.positions.get(str(worker.seat), [0, 0]), seen if seat == worker.seat else [0, 0])
        worker.seen_seq = max(seq, host.state.sequences.get(worker.name, -1))
        worker.seen_place = epoch, position
        worker.failed = min(host.state.failures.get(worker.name, 0), host.plan.bounds.failures - 1)

    def _welcome(self, worker: Member) -> dict[str, Any]:
        host = self.host
        epoch, position = host.state.positions.get(str(worker.seat), (0, 0))
        last = host.state.sequences.get(worker.name, -1)
        known = {"name": worker.name, "session": worker.session, "seat": host.plan.data_seat(worker.seat)}
        return {"kind": "welcome", **known, "epoch": epoch, "position": position, "last_seq": last}

    def _tell_of_joining(self, worker: Member, wanted: str | None) -> None:
        whose = f"{worker.name} joined ({', '.join(worker.about.values())})" if worker.about else f"{worker.name} joined"
        other = "" if wanted in (None, worker.name) else f": it asked for the name {wanted}, which belongs to another worker"
        self.tell(whose + other)

    def tell(self, text: str) -> None:
        """Who comes and goes is told to people, but a crowd at the door does not fill their screen."""
        host = self.host
        if not self._notes.take(host.now):
            self._untold += 1
            return
        if self._untold:
            host.emit(Note(f"{self._untold} more workers came or went"))
            self._untold = 0
        host.emit(Note(text))

    def hear_of_end(self, event: RequestReceived, asked: Gone) -> None:
        """Whoever has a worker's key says that its processes have ended."""
        host = self.host
        if not asked.proof:
            return host.emit(Reply(event.caller, self.door.challenge(event.session, host.now)))
        _, refusal = self.door.check(asked, "gone", self.members.by_name.get(asked.name), host.now, event.address)
        if not refusal.reason and host.state.keys.get(asked.name) != asked.key:
            refusal = JoinRefusal("unproved", f"{asked.name} has another key")
        if refusal.reason:
            return host.refuse(event.caller, *refusal)
        host.lose(asked.name, "has lost a process, and starts again")
        return host.emit(Reply(event.caller, {"kind": "goodbye"}))

    def remove(self, worker: Member, why: str, left: bool = False) -> None:
        """A worker takes part no longer. `left`: it said so itself, or comes back at once."""
        host = self.host
        self.members.remove(worker)
        host.rounds.deactivate(worker.name)
        host.parts.forget(worker.session)
        waited = host.waiting.pop(worker.session, None)
        callers = [waited.caller if waited is not None else None, host.lender.forget(worker, left) if host.lender is not None else None]
        for caller in callers:
            if caller is not None:
                host.refuse(caller, "unknown-session")
        self.door.leave(worker.name, host.state, host.now)
        self.tell(f"{worker.name} {why}")

    def _evict_silent(self) -> None:
        while (worker := self.members.silent(self.host.now)) is not None:
            self.remove(worker, f"is taken for dead: silent for {self.host.now - worker.seen_at:.0f} s")

    def _evict_uninvited(self) -> None:
        for guest in [guest for guest, workers in self.members.guests.items() if guest and workers]:
            if self.door.welcomes(guest).reason:
                self.show_out(guest)

    def show_out(self, guest: str) -> None:
        """The invitation of a person was withdrawn: their workers take part no longer. What was accepted of them stays."""
        theirs = [worker for worker in self.members.by_name.values() if worker.guest == guest]
        if not theirs:
            return
        self.host.record({"kind": "withdrawn", "guest": guest, "workers": [worker.name for worker in theirs]})
        for worker in theirs:
            self.remove(worker, f"is shown out: the invitation of {guest} was withdrawn", left=True)

    def _forget_unused(self) -> None:
        host = self.host
        while (name := self.members.released(host.now)) is not None:
            host.record({"kind": "quarantined", "worker": name, "guest": "", "out": False})
        while (name := self.door.forgettable(host.state, host.now)) is not None:
            host.record({"kind": "forgotten", "worker": name})
            self.members.replaced.pop(name, None)
            if host.lender is not None and host.lender.leases is not None:
                host.lender.leases.forget(name)

    def has_failed_too_often(self, worker: Member) -> bool:
        """Until one of the others has shown whether the units can be done at all."""
        return worker.failed >= self.host.plan.bounds.failures

    def at_work(self) -> Iterator[str]:
        most = self.host.plan.bounds.failures
        return (name for name, worker in self.members.by_name.items() if worker.failed < most)

    def blame(self, name: str, reason: str) -> None:
        if (worker := self.members.by_name.get(name)) is not None:
            worker.word = f"the coordinator has given this worker's unit to another one: {reason}"
            self.count_failure(worker, reason)

    def count_failure(self, worker: Member, reason: str) -> None:
        """A worker that fails unit after unit, while others manage theirs, would use up everybody's attempts."""
        host = self.host
        worker.reject("failed")
        worker.failed += 1
        host.record({"kind": "blamed", "worker": worker.name, "failed": worker.failed})
        others = [one for one in self.members.by_name.values() if one is not worker and one.accepted and not one.failed]
        if worker.failed < host.plan.bounds.failures or not others:
            return
        self.members.quarantine(worker.name, worker.guest, host.now + host.plan.bounds.quarantine_s)
        host.record({"kind": "quarantined", "worker": worker.name, "guest": worker.guest, "out": True})
        whom = f", with newcomers on the invitation of {worker.guest}," if worker.guest else ""
        host.emit(
            Note(
                f"warning: {worker.name} failed {worker.failed} units in a row that others manage, and is kept out{whom} for "
                f"{host.plan.bounds.quarantine_s:.0f} s: {reason}"
            )
        )
        self.remove(worker, "is in quarantine", left=True)
