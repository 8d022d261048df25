"""Leases of work units: what it means to issue, claim, renew, submit, give back, fail, lose, expire and cancel one.

A unit is pending, claimed, completed, failed (given up) or cancelled. This module is the meaning of those words; PostgreSQL's functions do
the same inside a database, and one suite of tests holds both. It reads no clock: time is passed in, in seconds, and never goes back.

Holds: a unit is claimed by one worker at most; nothing is accepted after its lease ended, for an older version, or beyond the quorum; a
unit is tried in vain `attempts` times at most, and then given up, so it never keeps an epoch from ending. Every call costs the same however
many workers and units there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

ACCEPTED, LATE, CANCELLED = "accepted", "late", "cancelled"
NO_RESULT_IN_TIME = "no result in time"
WORKER_IS_GONE = "its worker is gone"
RESULT_WAS_UNUSABLE = "its result could not be used"


class Lease(NamedTuple):
    """A worker's right to do a unit, until its deadline."""

    unit: int
    version: int
    """The version of the weights that the unit is to be done with."""
    worker: str
    attempt: int
    """The first attempt at a unit has number 1."""
    deadline: float


class GivenUp(NamedTuple):
    """A unit that was tried in vain as often as it may be."""

    unit: int
    reason: str
    """Why the last attempt was in vain."""


@dataclass
class Outcomes:
    """What became of the units that a worker claimed, for people to look at."""

    completed: int = 0
    """Results that were accepted."""
    late: int = 0
    """Results that came after the lease had ended, or when the round had enough."""
    cancelled: int = 0
    """Results for a version that was no longer wanted."""
    failed: int = 0
    """Attempts in vain: it said so, it disappeared, or its lease ended."""


class _Submitted(NamedTuple):
    unit: int
    version: int
    outcome: str


class Leases:
    """The units of one version: which wait, who holds which until when, and which have a result."""

    def __init__(self, lease_s: float, attempts: int) -> None:
        self.lease_s, self.attempts = lease_s, attempts
        self.version = -1
        self.quorum: int | None = None
        self.workers: dict[str, Outcomes] = {}
        self.given_up: dict[int, str] = {}
        """Why which units were given up, in the whole run."""
        self._pending: OrderedDict[int, None] = OrderedDict()
        """The next one to be claimed comes first."""
        self._claimed: OrderedDict[int, Lease] = OrderedDict()
        """The lease that ends next comes first: all leases are equally long, and one that is renewed moves to the end."""
        self._completed: set[int] = set()
        self._held_by: dict[str, dict[int, None]] = {}
        self._tried: dict[int, int] = {}
        """How often units were tried in vain. It outlives their version."""
        self._last: dict[str, _Submitted] = {}
        """What each worker handed in last, to recognise it when it comes again."""
        self._totals = {"issued": 0, "completed": 0, "cancelled": 0}
        """Units issued in all versions, and what became of those of older versions."""

    # --- the coordinator's side ----------------------------------------------------------------------

    def issue(self, version: int, units: Iterable[int], quorum: int | None) -> list[GivenUp]:
        """Offer units, in this order. A new version cancels what is open for older ones; the same version again adds units.

        A unit that is open stays as it is, and one that was given up stays so. One that has a result of this version is listed again
        because the result could not be used: that was an attempt in vain. With `quorum` results no more units are handed out, and no more
        results accepted, until the next version.
        """
        if version > self.version:
            self._cancel()
        self.version, self.quorum = version, quorum
        return [given_up for unit in units if (given_up := self._offer(unit))]

    def _offer(self, unit: int) -> GivenUp | None:
        if unit in self._completed:
            self._completed.remove(unit)
            return self._count_attempt(unit, RESULT_WAS_UNUSABLE)
        if unit not in self._pending and unit not in self._claimed and unit not in self.given_up:
            self._pending[unit] = None
            self._totals["issued"] += 1
        return None

    def _cancel(self) -> None:
        for unit in self._completed:
            self._tried.pop(unit, None)
        self._totals["completed"] += len(self._completed)
        self._totals["cancelled"] += len(self._pending) + len(self._claimed)
        for units in (self._completed, self._pending, self._claimed, self._held_by):
            units.clear()

    def expire(self, now: float) -> list[GivenUp]:
        """End the leases whose deadline has come; their units wait again, at the end, or are given up."""
        ended = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            ended.append(self._fail(next(iter(self._claimed.values())), NO_RESULT_IN_TIME))
        return [given_up for given_up in ended if given_up]

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, if no lease is renewed before."""
        return next(iter(self._claimed.values())).deadline if self._claimed else None

    def lose(self, worker: str) -> list[GivenUp]:
        """The worker disappeared without a word: what it held was tried in vain, since a unit may be what kills workers."""
        ended = [self._fail(lease, WORKER_IS_GONE) for lease in self.held(worker)]
        self._last.pop(worker, None)
        return [given_up for given_up in ended if given_up]

    @property
    def enough(self) -> bool:
        """Whether there are as many results of this version as the round needs."""
        return self.quorum is not None and len(self._completed) >= self.quorum

    # --- a worker's side -----------------------------------------------------------------------------

    def claim(self, worker: str, now: float) -> Lease | None:
        """Lease the unit that has waited longest. None: there is none, or the round has enough results."""
        if self.enough or not self._pending:
            return None
        unit, _ = self._pending.popitem(last=False)
        lease = Lease(unit, self.version, worker, self._tried.get(unit, 0) + 1, now + self.lease_s)
        self._claimed[unit] = lease
        self._held_by.setdefault(worker, {})[unit] = None
        if worker in self._last and self._last[worker][:2] == (unit, self.version):
            del self._last[worker]  # its next result of this unit is another one
        return lease

    def held(self, worker: str) -> list[Lease]:
        """What the worker has claimed, oldest first: the answer to one who asks again because the first answer was lost."""
        return [self._claimed[unit] for unit in self._held_by.get(worker, ())]

    def holds(self, worker: str, unit: int, now: float) -> bool:
        """Whether the worker's result of this unit would be accepted now."""
        lease = self._lease(worker, unit)
        return lease is not None and now < lease.deadline and not self.enough

    def renew(self, worker: str, now: float) -> None:
        """The worker was seen computing: what it holds is its own for a whole lease from now on. A lease that has ended stays ended."""
        for lease in self.held(worker):
            if now < lease.deadline:
                self._claimed[lease.unit] = lease._replace(deadline=now + self.lease_s)
                self._claimed.move_to_end(lease.unit)

    def submit(self, worker: str, unit: int, version: int, now: float) -> str:
        """Whether a result is accepted, late or cancelled. A worker's last submit, when it comes again, has the same outcome."""
        last = self._last.get(worker)
        if last is not None and last[:2] == (unit, version):
            return last.outcome
        outcome = CANCELLED if version < self.version else self._hand_in(worker, unit, now)
        self._last[worker] = _Submitted(unit, version, outcome)
        outcomes = self._outcomes(worker)
        outcomes.completed += outcome == ACCEPTED
        outcomes.late += outcome == LATE
        outcomes.cancelled += outcome == CANCELLED
        return outcome

    def _hand_in(self, worker: str, unit: int, now: float) -> str:
        lease = self._lease(worker, unit)
        if lease is None or now >= lease.deadline:
            return LATE
        if self.enough:
            self._give_back(lease)
            return LATE
        self._end(lease)
        self._completed.add(unit)
        return ACCEPTED

    def give_back(self, worker: str, unit: int) -> None:
        """Somebody else may do the unit; it does not count as an attempt."""
        if (lease := self._lease(worker, unit)) is not None:
            self._give_back(lease)

    def leave(self, worker: str) -> None:
        """The worker goes, and gives back what it holds."""
        for lease in self.held(worker):
            self._give_back(lease)

    def fail(self, worker: str, unit: int, reason: str) -> GivenUp | None:
        """The unit did not work there: another one tries, unless that was the last attempt."""
        lease = self._lease(worker, unit)
        return self._fail(lease, reason) if lease is not None else None

    # --- for people to look at -----------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Units by state, over all versions; together they are those that were `issued`."""
        completed = self._totals["completed"] + len(self._completed)
        open_now = {"pending": len(self._pending), "claimed": len(self._claimed)}
        return self._totals | open_now | {"completed": completed, "failed": len(self.given_up)}

    # --- how a lease ends ----------------------------------------------------------------------------

    def _lease(self, worker: str, unit: int) -> Lease | None:
        lease = self._claimed.get(unit)
        return lease if lease is not None and lease.worker == worker else None

    def _end(self, lease: Lease) -> None:
        del self._claimed[lease.unit]
        units = self._held_by[lease.worker]
        del units[lease.unit]
        if not units:
            del self._held_by[lease.worker]

    def _give_back(self, lease: Lease) -> None:
        self._end(lease)
        self._pending[lease.unit] = None

    def _fail(self, lease: Lease, reason: str) -> GivenUp | None:
        self._end(lease)
        self._outcomes(lease.worker).failed += 1
        return self._count_attempt(lease.unit, reason)

    def _count_attempt(self, unit: int, reason: str) -> GivenUp | None:
        """Let others try the unit, or give it up."""
        tried = self._tried.pop(unit, 0) + 1
        if tried >= self.attempts:
            self.given_up[unit] = reason
            return GivenUp(unit, reason)
        self._tried[unit] = tried
        self._pending[unit] = None
        return None

    def _outcomes(self, worker: str) -> Outcomes:
        return self.workers.setdefault(worker, Outcomes())
