"""Units of the data on lease: which are offered next, and what happens to their results.

Either the coordinator keeps the leases itself (`lease_table.py`), or a database does: then the coordinator offers units there (`Issue`)
and gets their results as events (`LeaseResult`). Holds: a unit is settled once, by a result that is learned from or by being given up.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from shoal.coordinator.effects import Issue, Note
from shoal.coordinator.events import LeaseResult
from shoal.coordinator.members.table import Member
from shoal.coordinator.rounds.plausibility import PlausibilityChecks
from shoal.coordinator.state import accepted_record
from shoal.coordinator.turn import CoordinatorContext, Replies, Turn
from shoal.coordinator.units.cut import ISSUED_PER_QUORUM, LEAST_ISSUED, DataCut, DataUnit
from shoal.coordinator.units.lease_table import HELD_TOO_LONG, GivenUp, Leases
from shoal.errors import printable
from shoal.protocol.frames import UpdateError
from shoal.protocol.messages import Claim, Contribute, Delivered, Failed, Frames
from shoal.updates import staleness
from shoal.updates.expert_subsets import ExpertIds

NO_UNIT = -1


class WaitingClaim(NamedTuple):
    """A worker whose claim is answered when there is a unit for it."""

    caller: Any
    worker: Member
    have: int
    since: float


class UnitLeasing:
    """The units of a run."""

    def __init__(self, context: CoordinatorContext, cut: DataCut, quorum: int, checks: PlausibilityChecks, replies: Replies) -> None:
        self.plan, self.policies, self.replayed, self.members, self.completion = context
        self.cut, self.quorum, self.checks, self.replies = cut, quorum, checks, replies
        self.leases = Leases(self.plan.lease_s, self.plan.attempts, self.members.at_work, per_version=self.per_version)
        """Empty where a database keeps the leases."""
        self.workers_elsewhere = 0
        """Number of workers that lease units from a database, when units were last issued there."""
        self.claims: OrderedDict[str, WaitingClaim] = OrderedDict()
        """By session, longest waiting first."""
        self._offered: list[int] = []
        self._settled_offers = 0
        """How many of them, from the first on, are known to be settled."""
        self._has_warned = False
        """Whether the user knows that units wait for a worker that can do them."""
        self._blamed: list[tuple[str, str]] = []
        """Workers whose units were taken away, and why."""

    @property
    def per_version(self) -> int | None:
        """Results that make a version; None: the aggregation rule may need results of more workers."""
        return self.policies.rounds.unit_quorum if self.plan.needed <= 1 else None

    # --- offers --------------------------------------------------------------------------------------

    def offer(self, turn: Turn) -> None:
        """Offer the next units for the newest version. Units that are leased stay leased, so as many others are offered beside them."""
        leased = self.workers_elsewhere if self.plan.leased_elsewhere else self.leases.counts()["claimed"]
        most = 0 if self.completion.finished else max(LEAST_ISSUED, ISSUED_PER_QUORUM * self.quorum) + leased
        self._offered, self._settled_offers = list(self.replayed.settled.open(self.cut.total, most)), 0
        if self.plan.leased_elsewhere:
            turn.emit(Issue(turn.state.version, self._offered, self._most_lag))
        else:
            for given_up in self.leases.issue(turn.state.version, self._offered, None, turn.now, self._most_lag):
                self._settle_as_failed(turn, given_up)

    @property
    def _most_lag(self) -> int:
        """Versions that may be made while a worker computes a unit, with the workers that are here now."""
        if self.plan.most_lag is not None:
            return self.plan.most_lag
        workers = self.workers_elsewhere if self.plan.leased_elsewhere else sum(1 for _ in self.members.at_work())
        return staleness.bound_for(workers, self.quorum)

    def offer_more(self, turn: Turn) -> None:
        """Offer more units if all on offer are settled and the round is still open: units were given up, or the rule needs more workers."""
        if not self._offered or self.completion.finished or turn.state.paused or not self._all_offers_settled():
            return None
        needed, contributed = self.plan.needed, self.replayed.rounds.workers(turn.state.version)
        if contributed < needed:
            text = f"{self.plan.updates.aggregation.kind} needs results of {needed} workers, and {contributed} have handed in"
            if self.plan.updates.below_quorum == "stop" and turn.state.version > 0:
                return turn.stop(self.completion, f"{text}: stopped, as updates.below_quorum says")
            turn.emit(Note(f"{text}: waiting for {needed - contributed} more"))
        return self.offer(turn)

    def _all_offers_settled(self) -> bool:
        """A settled unit stays settled, so each offer is looked at once, however often this is called."""
        offered, settled = self._offered, self.replayed.settled
        while self._settled_offers < len(offered) and offered[self._settled_offers] in settled:
            self._settled_offers += 1
        return self._settled_offers == len(offered)

    # --- leases in a database ------------------------------------------------------------------------

    def take(self, turn: Turn, event: LeaseResult) -> None:
        """Take the result of a unit. The database has replied to its worker already."""
        asked = event.asked
        number = self.cut.number(asked.epoch, asked.start)
        if not self.cut.has(DataUnit(asked.epoch, asked.start, asked.batches)):
            what = f"batches {asked.start} to {asked.start + asked.batches} of epoch {asked.epoch + 1}"
            why = f"the row of a result in the database is damaged: it names {what}, which are no unit of this run. The unit is done again"
            return self.return_unusable(turn, asked.epoch, asked.start, why)
        if number in self.replayed.settled:
            return turn.state.count("repeated")
        if isinstance(asked, Failed):
            return self._give_up(turn, asked, number)
        return self._deliver(turn, asked, event.frames, number)

    def _deliver(self, turn: Turn, asked: Delivered, frames: Frames, number: int) -> None:
        """Record a result for the round that is open; one of an older version has less weight."""
        try:
            decoded = self.replayed.decode(frames)
        except UpdateError as error:
            return self.return_unusable(turn, asked.epoch, asked.start, f"what {asked.worker} sent cannot be used: {error}")
        version, asked = turn.state.version, self.checks.bounded_unit(asked)
        share = self.policies.admission.share(max(0, version - asked.base), 1.0)
        turn.record(_unit_record(asked, number, share, version), frames, decoded)
        return None

    def return_unusable(self, turn: Turn, epoch: int, start: int, why: str) -> None:
        """Offer a unit again whose result cannot be used; where it is unknown which one that is, all that are on offer and not settled.
        The database counts that as a failed attempt."""
        number = self.cut.number(epoch, start)
        is_unit = 0 <= number < self.cut.total and self.cut.unit(number)[:2] == (epoch, start)
        again = [one for one in ([number] if is_unit else self._offered) if one not in self.replayed.settled]
        turn.state.count("malformed")
        turn.emit(Note(f"warning: {printable(why)}"), Issue(turn.state.version, again, self._most_lag))

    def _give_up(self, turn: Turn, asked: Failed, number: int) -> None:
        turn.record({"kind": "failed", "unit": number, **asked._asdict()})
        turn.emit(Note(f"warning: unit {number} of epoch {asked.epoch + 1} is given up: {printable(asked.reason)}"))

    # --- leases that the coordinator keeps -----------------------------------------------------------

    def claim(self, turn: Turn, caller: Any, asked: Claim, worker: Member) -> WaitingClaim | None:
        """Queue a claim; it is answered when there is a unit. Return the worker's earlier claim, which this one replaces."""
        before = self.claims.pop(worker.session, None)
        self.claims[worker.session] = WaitingClaim(caller, worker, asked.have, turn.now)
        return before

    def answer_claims(self, turn: Turn, longest_s: float) -> None:
        """Answer waiting claims: with a unit, or without one after the longest wait or when the run is over."""
        none_left = self.completion.finished or turn.state.paused
        others_work = bool(self.claims) and any(True for _ in self.members.at_work())  # once: many claims may wait
        for session, claim in list(self.claims.items()):
            excluded = others_work and claim.worker.failed >= self.plan.bounds.failures
            lease = None if none_left or excluded else self._lease(turn, claim.worker)
            none_left = none_left or not (excluded or self.leases.any_waits)
            if lease is None and not self.completion.finished and turn.now - claim.since < longest_s:
                if none_left:
                    return  # later claims have waited less
                continue
            del self.claims[session]
            self.replies.send(turn, claim.caller, lease or {"kind": "lease", "unit": NO_UNIT}, claim.worker, claim.have)

    def take_blamed(self) -> list[tuple[str, str]]:
        """Workers whose units were taken away since the last call, and why."""
        blamed, self._blamed = self._blamed, []
        return blamed

    def _lease(self, turn: Turn, worker: Member) -> dict[str, Any] | None:
        """The header of a lease. A worker has one unit at a time: if it holds one and claims again, the reply was lost."""
        for lease in self.leases.held(worker.name):
            if lease.version != self.leases.version:  # the reply contains newer weights than those of the lease
                self.leases.give_back(worker.name, lease.unit)
        held = self.leases.held(worker.name)
        found = held[0] if held else self.leases.claim(worker.name, turn.now)
        if found is None and self._take_from_slowest(turn, worker):
            found = self.leases.claim(worker.name, turn.now)
        if found is None:
            return None
        epoch, start, batches = self.cut.unit(found.unit)
        unit = {"kind": "lease", "unit": found.unit, "epoch": epoch, "start": start, "batches": batches}
        return unit | self.replayed.lease_fields(found.unit)

    def _take_from_slowest(self, turn: Turn, worker: Member) -> bool:
        """Take away the unit that has been held for too long, as this worker has nothing to do; return whether there was one."""
        taken = self.leases.take_from_slowest(worker.name, turn.now)
        if taken is None:
            return False
        lease, given_up = taken
        held_s = turn.now - lease.since
        text = f"{lease.worker} has held unit {lease.unit} for {held_s:.0f} s, longer than others need, and {worker.name} has nothing to do"
        turn.emit(Note(f"warning: {text}: the unit is taken away from {lease.worker}. Smaller units (batches_per_unit) suit slow workers"))
        self._settle_as_failed(turn, given_up)
        self._blamed.append((lease.worker, HELD_TOO_LONG))
        return True

    def submit(self, turn: Turn, worker: Member, asked: Contribute, frames: Frames) -> str:
        """Record a unit's result if its lease is held; return the outcome. Raises UpdateError."""
        if not self.leases.holds(worker.name, asked.unit, turn.now):
            return self.leases.submit(worker.name, asked.unit, asked.base, turn.now)
        try:
            decoded = self.replayed.decode_unit(frames, asked.unit, asked.base, worker.name, worker.experts)
        except UpdateError as error:
            reason = f"what {worker.name} sent cannot be used: {error}"
            self._settle_as_failed(turn, self.leases.fail(worker.name, asked.unit, reason, turn.now))
            raise
        outcome = self.leases.submit(worker.name, asked.unit, asked.base, turn.now)
        if outcome == "accepted":
            self._has_warned = False
            unit = self.cut.unit(asked.unit)
            result = Delivered(worker.name, asked.seq, asked.base, asked.weight, asked.samples, *unit, asked.metrics)
            share = self.policies.admission.share(turn.state.version - asked.base, 1.0)
            record = _unit_record(self.checks.bounded_unit(result), asked.unit, share, turn.state.version, worker.experts)
            turn.record(record, frames, decoded)
        return outcome

    def fail(self, turn: Turn, worker: Member, unit: int, reason: str) -> bool:
        """Take a unit back that the worker could not do; return whether it had it."""
        held = any(lease.unit == unit for lease in self.leases.held(worker.name))
        self._settle_as_failed(turn, self.leases.fail(worker.name, unit, reason, turn.now))
        if held:
            self._warn_of_waiting(turn, unit, reason)
        return held

    def _warn_of_waiting(self, turn: Turn, unit: int, reason: str) -> None:
        """Say why a unit is not given up yet, once until some worker has completed one."""
        if self._has_warned or not self.leases.waits_for_reliable_worker(unit):
            return
        self._has_warned = True
        text = f"unit {unit} failed {self.leases.attempts} times, and no connected worker has completed one yet: {reason}"
        turn.emit(Note(f"warning: {text}. Such units wait {self.leases.patience_s:.0f} s for a worker that can do them"))

    def forget(self, turn: Turn, worker: Member, left: bool) -> WaitingClaim | None:
        """Take back the units of a worker that is gone; `left`: it said so. Return its waiting claim, if it has one."""
        if left:
            self.leases.leave(worker.name)
        for given_up in self.leases.lose(worker.name, turn.now):
            self._settle_as_failed(turn, given_up)
        return self.claims.pop(worker.session, None)

    def expire(self, turn: Turn) -> None:
        """End leases without a result in time: the unit is pending again, or given up."""
        for given_up in self.leases.expire(turn.now):
            self._settle_as_failed(turn, given_up)

    def _settle_as_failed(self, turn: Turn, given_up: GivenUp | None) -> None:
        if given_up is not None and given_up.unit not in self.replayed.settled:
            self._give_up(turn, Failed(*self.cut.unit(given_up.unit), given_up.reason), given_up.unit)


def _unit_record(asked: Delivered, unit: int, share: float, number: int, experts: ExpertIds = ()) -> dict[str, Any]:
    """The record of a unit's result. All units belong to seat 0: each is done once, by any worker."""
    return accepted_record(asked, asked.worker, 0, asked.start + asked.batches, share, number, experts) | {"unit": unit}
