"""Units of the data on lease: what is offered next, and what becomes of the results.

The coordinator keeps the leases itself (`leases.py`), or a database does: then the coordinator offers units there (`Issue`) and hears what
came of them (`LeaseResult`). Either way a unit is settled once: learned from, or given up after too many attempts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shoal.coordinator.durable.replayed_state import ReplayedState
from shoal.coordinator.effects import Effect, Frames, Issue, Note, StopRun
from shoal.coordinator.members.table import Member
from shoal.coordinator.rounds.plausibility import PlausibilityChecks
from shoal.coordinator.state import LeaseResult, RunPlan, delivered
from shoal.coordinator.units.cut import ISSUED_PER_QUORUM, LEAST_ISSUED, DataCut
from shoal.coordinator.units.leases import HELD_TOO_LONG, GivenUp, Leases
from shoal.errors import printable
from shoal.protocol.frames import UpdateError
from shoal.protocol.messages import Claim, Contribute, Delivered, Failed
from shoal.updates import staleness

NO_UNIT = -1


class Attendance(Protocol):
    """Who takes part, as far as units are concerned."""

    def has_failed_too_often(self, worker: Member) -> bool:
        """Whether the worker is given no units for now, where others are here who have not failed so many in a row."""
        ...

    def at_work(self) -> Iterator[str]:
        """The names of those who are here and have not failed too many units in a row."""
        ...

    def blame(self, name: str, reason: str) -> None:
        """A worker of this name had a unit in vain, and has not said so itself."""
        ...


class Host(Protocol):
    """The coordinator that lends units."""

    plan: RunPlan
    book: ReplayedState
    now: float
    claims: PlausibilityChecks

    @property
    def attendance(self) -> Attendance: ...
    @property
    def finished(self) -> bool: ...
    def emit(self, *effects: Effect) -> None: ...
    def record(self, record: dict[str, Any], frames: Frames = (), decoded: tuple[Tensor, Tensor] | None = None) -> None: ...
    def answer(self, caller: Any, header: dict[str, Any], worker: Member, have: int) -> None: ...
    def stop_for(self, reason: str) -> None: ...


class WaitingClaim(NamedTuple):
    """A worker whose answer is held back until there is a unit for it."""

    caller: Any
    worker: Member
    have: int
    since: float


class UnitLeasing:
    """The units of a run."""

    def __init__(self, host: Host, cut: DataCut, quorum: int) -> None:
        self.host, self.cut, self.quorum = host, cut, quorum
        plan = host.plan
        self.leases = None if plan.leased_elsewhere else Leases(plan.lease_s, plan.attempts, plan.most_lag, host.attendance.at_work)
        self.claiming: OrderedDict[str, WaitingClaim] = OrderedDict()
        """By session, longest waiting first."""
        self._offered: list[int] = []
        self._settled_offers = 0
        """How many of them, from the first on, are known to be settled."""
        self._has_told = False
        """Whether people know that units wait for somebody who can do them."""
        self._blamed: list[tuple[str, str]] = []
        """Workers whose units were taken away, and why."""

    # --- what is offered ---------------------------------------------------------------------------

    def offer(self) -> None:
        """Offer the units that are to be done next, for the version there is now."""
        host = self.host
        most = 0 if host.finished else max(LEAST_ISSUED, ISSUED_PER_QUORUM * self.quorum)
        self._offered, self._settled_offers = list(host.book.settled.open(self.cut.total, most)), 0
        self._issue(self._offered)

    def _issue(self, units: list[int]) -> None:
        version = self.host.book.state.version
        if self.leases is None:
            self.host.emit(Issue(version, units))
        else:
            for given_up in self.leases.issue(version, units, None, self.host.now):
                self._failed(given_up)

    def offer_more(self) -> None:
        """All units on offer are settled, and the round is still open: units were given up, or the rule needs results of more workers."""
        host = self.host
        if not self._offered or host.finished or host.book.state.paused or not self._all_settled():
            return None
        needed, there = host.plan.needed, host.book.rounds.workers(host.book.state.version)
        if there < needed:
            text = f"{host.plan.updates.aggregation.kind} needs results of {needed} workers, and {there} have handed in"
            if host.plan.updates.below_quorum == "stop" and host.book.state.version > 0:
                reason = f"{text}: stopped, as updates.below_quorum says"
                host.stop_for(reason)
                return host.emit(StopRun(reason))
            host.emit(Note(f"{text}: waiting for {needed - there} more"))
        self.offer()

    def _all_settled(self) -> bool:
        """Whether every unit on offer is settled. What is settled stays so: each unit is looked at once, however often this is asked."""
        offered, settled = self._offered, self.host.book.settled
        while self._settled_offers < len(offered) and offered[self._settled_offers] in settled:
            self._settled_offers += 1
        return self._settled_offers == len(offered)

    # --- leases that a database keeps ----------------------------------------------------------------

    def take(self, event: LeaseResult) -> None:
        """Take in what came of a unit. Its worker was answered by the database."""
        asked = event.asked
        number = self.cut.number(asked.epoch, asked.start)
        if number in self.host.book.settled:
            return self.host.book.state.count("repeated")
        if isinstance(asked, Failed):
            return self._give_up(asked, number)
        return self._deliver(asked, event.frames, number)

    def _deliver(self, asked: Delivered, frames: Frames, number: int) -> None:
        """A result that came while a round closed is in the next one, and counts less."""
        host = self.host
        try:
            decoded = host.book.decode(frames)
        except UpdateError as error:
            return self.spoil(asked.epoch, asked.start, f"what {asked.worker} sent cannot be used: {error}")
        version, asked = host.book.state.version, host.claims.delivered(asked)
        host.record(delivered(asked, number, staleness.weight(max(0, version - asked.base)), version), frames, decoded)
        return None

    def spoil(self, epoch: int, start: int, why: str) -> None:
        """What was handed in for a unit cannot be used: the unit is offered again. The database counts that as an attempt in vain."""
        self.host.book.state.count("malformed")
        number = self.cut.number(epoch, start)
        self.host.emit(Note(f"warning: {printable(why)}"), Issue(self.host.book.state.version, [number]))

    def _give_up(self, asked: Failed, number: int) -> None:
        fields = {name: getattr(asked, name) for name in ("epoch", "start", "batches", "reason")}
        self.host.record({"kind": "failed", "unit": number, **fields})
        self.host.emit(Note(f"warning: unit {number} of epoch {asked.epoch + 1} is given up: {printable(asked.reason)}"))

    # --- leases that the coordinator keeps -----------------------------------------------------------

    def claim(self, caller: Any, asked: Claim, worker: Member) -> Any:
        """Lend a unit, now or as soon as there is one. Return the caller that no longer waits: the worker asked again."""
        before = self.claiming.pop(worker.session, None)
        self.claiming[worker.session] = WaitingClaim(caller, worker, asked.have, self.host.now)
        return None if before is None else before.caller

    def serve(self, longest_s: float) -> None:
        """Answer those who wait for a unit: with one, or with a word after the longest wait, or when the run is over."""
        none_left = self.host.finished or self.host.book.state.paused
        others_work = bool(self.claiming) and any(True for _ in self.host.attendance.at_work())  # looked for once: a crowd may wait here
        for session, claiming in list(self.claiming.items()):
            paused = others_work and self.host.attendance.has_failed_too_often(claiming.worker)
            lease = None if none_left or paused else self._lease(claiming.worker)
            none_left = none_left or not (paused or self._any_waits)
            if lease is None and not self.host.finished and self.host.now - claiming.since < longest_s:
                if none_left:
                    return  # those who came later have waited less
                continue
            del self.claiming[session]
            self.host.answer(claiming.caller, lease or {"kind": "lease", "unit": NO_UNIT}, claiming.worker, claiming.have)

    def blame(self) -> None:
        """Count it with those whose units were taken away. That may keep them out, so it is done when everybody else was served."""
        blamed, self._blamed = self._blamed, []
        for name, reason in blamed:
            self.host.attendance.blame(name, reason)

    @property
    def _any_waits(self) -> bool:
        return self.leases is not None and self.leases.any_waits

    def _lease(self, worker: Member) -> dict[str, Any] | None:
        """One unit at a time: a worker that holds one, and asks again, has lost the answer."""
        assert self.leases is not None
        for lease in self.leases.held(worker.name):
            if lease.version != self.leases.version:  # the answer brings newer weights than it was leased with
                self.leases.give_back(worker.name, lease.unit)
        held = self.leases.held(worker.name)
        found = held[0] if held else self.leases.claim(worker.name, self.host.now)
        if found is None and self._free_hostage(worker):
            found = self.leases.claim(worker.name, self.host.now)
        if found is None:
            return None
        epoch, start, batches = self.cut.unit(found.unit)
        unit = {"kind": "lease", "unit": found.unit, "epoch": epoch, "start": start, "batches": batches}
        return unit | self.host.book.lease(found.unit)

    def _free_hostage(self, worker: Member) -> bool:
        assert self.leases is not None
        freed = self.leases.free_hostage(worker.name, self.host.now)
        if freed is None:
            return False
        lease, given_up = freed
        held_s = self.host.now - lease.since
        text = f"{lease.worker} has held unit {lease.unit} for {held_s:.0f} s, longer than others need, and {worker.name} has nothing to do"
        self.host.emit(
            Note(f"warning: {text}: the unit is taken away from {lease.worker}. Smaller units (batches_per_unit) suit slow workers")
        )
        self._failed(given_up)
        self._blamed.append((lease.worker, HELD_TOO_LONG))
        return True

    def submit(self, worker: Member, asked: Contribute, frames: Frames) -> str:
        """Take a unit's result where its lease is held. Return what became of it. Raises UpdateError."""
        assert self.leases is not None
        host, state = self.host, self.host.book.state
        if not self.leases.holds(worker.name, asked.unit, host.now):
            return self.leases.submit(worker.name, asked.unit, asked.base, host.now)
        try:
            decoded = host.book.decode_unit(frames, asked.unit, asked.base, worker.name, worker.experts)
        except UpdateError as error:
            self._failed(self.leases.fail(worker.name, asked.unit, f"what {worker.name} sent cannot be used: {error}", host.now))
            raise
        outcome = self.leases.submit(worker.name, asked.unit, asked.base, host.now)
        if outcome == "accepted":
            self._has_told = False
            unit = self.cut.unit(asked.unit)
            result = Delivered(worker.name, asked.seq, asked.base, asked.weight, asked.samples, *unit, asked.metrics)
            host.record(delivered(host.claims.delivered(result), asked.unit, 1.0, state.version, worker.experts), frames, decoded)
        return outcome

    def give_back(self, worker: Member, unit: int) -> None:
        assert self.leases is not None
        self.leases.give_back(worker.name, unit)

    def fail(self, worker: Member, unit: int, reason: str) -> bool:
        """The worker could not do a unit. Return whether it had it."""
        assert self.leases is not None
        held = any(lease.unit == unit for lease in self.leases.held(worker.name))
        self._failed(self.leases.fail(worker.name, unit, reason, self.host.now))
        if held:
            self._tell_of_waiting(unit, reason)
        return held

    def _tell_of_waiting(self, unit: int, reason: str) -> None:
        """Say why a unit is not given up yet, once until somebody has managed one."""
        assert self.leases is not None
        if self._has_told or not self.leases.waits_for_somebody(unit):
            return
        self._has_told = True
        text = f"unit {unit} was tried in vain {self.leases.attempts} times, and nobody who is here has managed one yet: {reason}"
        self.host.emit(Note(f"warning: {text}. Such units wait {self.leases.patience_s:.0f} s for somebody who can do them"))

    def renew(self, worker: Member) -> None:
        """The worker was seen at work."""
        if self.leases is not None:
            self.leases.renew(worker.name, self.host.now)

    def forget(self, worker: Member, left: bool) -> Any:
        """The worker is gone, and said so or not: others may do what it had. Return the caller that waited for a unit, if it did."""
        if self.leases is not None and left:
            self.leases.leave(worker.name)
        elif self.leases is not None:
            for given_up in self.leases.lose(worker.name, self.host.now):
                self._failed(given_up)
        claiming = self.claiming.pop(worker.session, None)
        return None if claiming is None else claiming.caller

    def expire(self) -> None:
        """Leases that ended without a result: the unit is pending again, or given up."""
        for given_up in self.leases.expire(self.host.now) if self.leases is not None else ():
            self._failed(given_up)

    def _failed(self, given_up: GivenUp | None) -> None:
        if given_up is not None and given_up.unit not in self.host.book.settled:
            self._give_up(Failed(*self.cut.unit(given_up.unit), given_up.reason), given_up.unit)
