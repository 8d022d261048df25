"""Leases of work units: what it means to issue, claim, renew, submit, give back, fail, lose, expire and cancel one.

A unit is pending, claimed, completed, failed (given up) or cancelled. This module is the meaning of those words; PostgreSQL's functions do
the same inside a database, and one suite of tests holds both. It reads no clock: time is passed in, in seconds, and never goes back.

Holds: one worker at most has a unit; nothing is accepted after its lease ended, for a version that is too old, or beyond the quorum; a unit
is tried in vain `attempts` times at most, and then given up, so it never keeps an epoch from ending; as long as somebody else is there to
try it, a unit does not come back to a worker that tried it in vain, so no worker uses up the attempts of all. No call walks through all
units or workers, except that a new version looks at the units that workers have.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

ACCEPTED, LATE, CANCELLED = "accepted", "late", "cancelled"
NO_RESULT_IN_TIME, WORKER_IS_GONE, RESULT_WAS_UNUSABLE = "no result in time", "its worker is gone", "its result could not be used"


class Lease(NamedTuple):
    """A worker's right to do a unit with the weights of a version, until its deadline. The first attempt has number 1."""

    unit: int
    version: int
    worker: str
    attempt: int
    deadline: float


class GivenUp(NamedTuple):
    """A unit that was tried in vain as often as it may be, and why the last attempt was in vain."""

    unit: int
    reason: str


class Leases:
    """The units of one version: which wait, who holds which until when, and which have a result."""

    def __init__(self, lease_s: float, attempts: int, most_lag: int = 0) -> None:
        """`most_lag`: versions that may be made while a worker has a unit, before that is cancelled."""
        self.lease_s, self.attempts, self.most_lag = lease_s, attempts, most_lag
        self.version = -1
        self.quorum: int | None = None
        self.workers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """What became of the units of each worker: completed, late, cancelled, and failed (it said so, disappeared or took too long)."""
        self.given_up: dict[int, str] = {}
        self._pending: OrderedDict[int, None] = OrderedDict()
        """The next one to be claimed comes first."""
        self._claimed: OrderedDict[int, Lease] = OrderedDict()
        """The lease that ends next comes first: all are equally long, and one that is renewed moves to the end."""
        self._completed: dict[int, Lease] = {}
        self._held_by: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self._tried: defaultdict[int, list[Lease]] = defaultdict(list)
        """The leases under which units were tried in vain. They outlive their version."""
        self._last: dict[str, tuple[tuple[int, int], str]] = {}
        """The unit and version that each worker handed in last, and the outcome: to recognise a result that comes again."""
        self._totals = {"issued": 0, "completed": 0, "cancelled": 0}
        """Units issued in all versions, and what became of those of older versions."""

    # --- the coordinator's side ----------------------------------------------------------------------

    def issue(self, version: int, units: Sequence[int], quorum: int | None) -> list[GivenUp]:
        """Offer units, in this order. A new version cancels what is open for those that are too old; the same version again adds units.

        A unit that is open stays as it is, and one that was given up stays so. One that has a result of this version is listed again
        because that could not be used: it was an attempt in vain. With `quorum` results of a version no more are asked for or accepted.
        """
        if version != self.version:
            self._cancel(version)
        self.version, self.quorum = version, quorum
        spoiled = [unit for unit in units if unit in self._completed]
        new = [unit for unit in units if not any(unit in known for known in (self._completed, self._pending, self._claimed, self.given_up))]
        given_up = _only([self._count_attempt(self._completed.pop(unit), RESULT_WAS_UNUSABLE) for unit in spoiled])
        self._pending.update(dict.fromkeys(new))
        self._totals["issued"] += len(new)
        return given_up

    def _cancel(self, version: int) -> None:
        for unit in self._completed:
            self._tried.pop(unit, None)
        late = [lease for lease in self._claimed.values() if lease.version < version - self.most_lag]
        self._totals["completed"] += len(self._completed)
        self._totals["cancelled"] += len(self._pending) + len(late)
        for units in (self._completed, self._pending):
            units.clear()
        for lease in late:
            self._end(lease)

    def expire(self, now: float) -> list[GivenUp]:
        """End the leases whose deadline has come: their units wait again, at the end, or are given up."""
        ended = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            ended.append(self._fail(next(iter(self._claimed.values())), NO_RESULT_IN_TIME))
        return _only(ended)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, if no lease is renewed before."""
        return next(iter(self._claimed.values())).deadline if self._claimed else None

    def lose(self, worker: str) -> list[GivenUp]:
        """The worker disappeared without a word. What it held was tried in vain, since a unit may be what kills workers."""
        return _only([self._fail(lease, WORKER_IS_GONE) for lease in self.held(worker)])

    @property
    def enough(self) -> bool:
        """Whether there are as many results of this version as the round needs."""
        return self.quorum is not None and len(self._completed) >= self.quorum

    def counts(self) -> dict[str, int]:
        """Units by state, over all versions; together they are those that were `issued`."""
        completed = self._totals["completed"] + len(self._completed)
        open_now = {"pending": len(self._pending), "claimed": len(self._claimed)}
        return self._totals | open_now | {"completed": completed, "failed": len(self.given_up)}

    # --- a worker's side -----------------------------------------------------------------------------

    @property
    def any_waits(self) -> bool:
        """Whether there is a unit to claim, though not for each worker."""
        return bool(self._pending) and not self.enough

    def claim(self, worker: str, now: float, present: Callable[[], Iterable[str]] = tuple) -> Lease | None:
        """Lease the unit that has waited longest. None: there is none for this worker, or the round has enough results.

        What it tried in vain itself is for the others who are `present`, until all have tried it or its lease of then would have ended.
        """
        waiting = self._pending if self.any_waits else ()
        unit = next((unit for unit in waiting if self._may_try(unit, worker, now, present)), None)
        if unit is None:
            return None
        del self._pending[unit]
        lease = Lease(unit, self.version, worker, len(self._tried.get(unit, ())) + 1, now + self.lease_s)
        self._claimed[unit] = lease
        self._held_by[worker][unit] = None
        if worker in self._last and self._last[worker][0] == (unit, self.version):
            del self._last[worker]  # the next result of this unit is another one
        return lease

    def _may_try(self, unit: int, worker: str, now: float, present: Callable[[], Iterable[str]]) -> bool:
        tried = {lease.worker: lease.deadline for lease in self._tried.get(unit, ())}
        return tried.get(worker, now) <= now or all(name in tried for name in present())

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
        """Whether a result is accepted, late or cancelled. What a worker submitted last has the same outcome when it comes again."""
        last = self._last.get(worker)
        if last is not None and last[0] == (unit, version):
            return last[1]
        outcome = CANCELLED if version < self.version - self.most_lag else self._hand_in(worker, unit, version, now)
        self._last[worker] = (unit, version), outcome
        self.workers[worker]["completed" if outcome == ACCEPTED else outcome] += 1
        return outcome

    def _hand_in(self, worker: str, unit: int, version: int, now: float) -> str:
        lease = self._lease(worker, unit)
        if lease is None or version != lease.version or now >= lease.deadline:
            return LATE
        self._end(lease)
        if self.enough:
            self._pending[unit] = None
            return LATE
        self._completed[unit] = lease
        return ACCEPTED

    def give_back(self, worker: str, unit: int) -> None:
        """Somebody else may do the unit; it does not count as an attempt."""
        if (lease := self._lease(worker, unit)) is not None:
            self._end(lease)
            self._pending[unit] = None

    def leave(self, worker: str) -> None:
        """The worker goes, and gives back what it holds."""
        for lease in self.held(worker):
            self.give_back(worker, lease.unit)

    def fail(self, worker: str, unit: int, reason: str) -> GivenUp | None:
        """The unit did not work there: another one tries, unless that was the last attempt."""
        lease = self._lease(worker, unit)
        return self._fail(lease, reason) if lease is not None else None

    # --- how a lease ends ----------------------------------------------------------------------------

    def _lease(self, worker: str, unit: int) -> Lease | None:
        lease = self._claimed.get(unit)
        return lease if lease is not None and lease.worker == worker else None

    def _end(self, lease: Lease) -> None:
        del self._claimed[lease.unit], self._held_by[lease.worker][lease.unit]

    def _fail(self, lease: Lease, reason: str) -> GivenUp | None:
        self._end(lease)
        self.workers[lease.worker]["failed"] += 1
        return self._count_attempt(lease, reason)

    def _count_attempt(self, lease: Lease, reason: str) -> GivenUp | None:
        """Let others try the unit, or give it up."""
        unit = lease.unit
        self._tried[unit].append(lease)
        if len(self._tried[unit]) < self.attempts:
            self._pending[unit] = None
            return None
        del self._tried[unit]
        self.given_up[unit] = reason
        return GivenUp(unit, reason)


def _only(found: Iterable[GivenUp | None]) -> list[GivenUp]:
    return [given_up for given_up in found if given_up is not None]
