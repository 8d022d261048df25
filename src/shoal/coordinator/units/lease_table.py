"""Leases of work units: issue, claim, renew, submit, give back, fail, lose, expire and cancel.

A unit is pending, claimed, completed, failed (given up) or cancelled. PostgreSQL's functions do the same inside a database, and one suite
of tests holds both. It reads no clock: time is passed in, in seconds, and never goes back.

Holds: at most one worker has a unit. No result is accepted after its lease ended or for a version that is too old; where no lag is
allowed, none beyond the quorum either. A leased unit stays leased when a new version comes, until it lags too much: only pending units are
issued again. A unit does not come back to a worker that failed it while others are present that have not tried it. A unit that failed
`attempts` times is given up, so it never keeps an epoch from ending. Names are free, so a crowd of new workers that fail everything must
not give units up: while reliable workers (more units completed than failed) are present, only their attempts count, and each of them, or
`attempts` of them, must have tried the unit; without any, the unit waits some leases' time for one. A worker that has delivered a result
waits for the next version if that is near, as newer weights make its unit worth more; it never waits for a result that is overdue. No call
walks through all units or workers, except that a new version looks at the units that are leased, and a failure that may be the last one at
the workers that are present.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from statistics import median
from typing import NamedTuple

ACCEPTED, LATE, CANCELLED = "accepted", "late", "cancelled"
NO_RESULT_IN_TIME, WORKER_IS_GONE, RESULT_WAS_UNUSABLE = "no result in time", "its worker is gone", "its result could not be used"
HELD_TOO_LONG = "it was held for longer than others need, while they had nothing to do"
_TIMES_AS_LONG = 4
"""A unit that is held this many times as long as usual, and longer than a lease, goes to an idle worker."""
PATIENCE_LEASES = 4
"""Leases' time that a failed unit waits for a reliable worker."""
_LAST_TIMES = 101
"""Number of latest results whose median time counts as usual."""
_PATIENCE, _PATIENCE_WITHOUT_LAG = 0.25, 1.0
"""Longest wait for a version that is near, as a share of the worker's usual time for a unit. Equally fast workers differ by a few percent.
Where no lag is allowed, the unit that the worker would begin could not count, so the wait may be as long as the unit."""
_SHORTEST_S = 0.2
"""For shorter units, a wait would cost more than it saves."""
_OVERDUE, _OVERDUE_S = 1.5, 0.05
"""A result is overdue after this multiple of its worker's usual time, and this time more."""
_MOST_EXPECTED = 1000
"""Leases, the oldest first, that are looked at for results that are expected."""
_NEWEST = 0.3
"""Share of the last unit in the usual time of a worker."""


class Lease(NamedTuple):
    """A worker's right to compute a unit with the weights of a version, until its deadline. The first attempt has number 1."""

    unit: int
    version: int
    worker: str
    attempt: int
    deadline: float
    since: float
    """When it was claimed."""


class GivenUp(NamedTuple):
    """A unit that failed as often as it may, and why it failed last."""

    unit: int
    reason: str


class Tries:
    """Failed attempts at a unit by worker. There may be many, so lookups take constant time."""

    def __init__(self, now: float) -> None:
        self.first_at, self.count = now, 0
        self.times: Counter[str] = Counter()
        self.last: dict[str, float] = {}

    def add(self, worker: str, now: float) -> None:
        self.count += 1
        self.times[worker] += 1
        self.last[worker] = now


class Leases:
    """The units of one version: which are pending, which worker holds which until when, and which are completed."""

    def __init__(
        self,
        lease_s: float,
        attempts: int,
        present: Callable[[], Iterable[str]] = tuple,
        patience_leases: float = PATIENCE_LEASES,
        per_version: int | None = None,
    ) -> None:
        """`present`: workers that are here, unless they keep failing. `per_version`: results that make a version; None: no fixed number."""
        self.lease_s, self.attempts, self.present = lease_s, attempts, present
        self.patience_s, self.per_version = patience_leases * lease_s, per_version
        self.version = self.oldest = -1
        """`oldest`: the oldest version whose leases still count."""
        self.quorum: int | None = None
        self.most_lag = 0
        self.workers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By worker: units completed, late, cancelled and failed (reported, disappeared or took too long)."""
        self.given_up: dict[int, str] = {}
        self._pending: OrderedDict[int, None] = OrderedDict()
        """In the order in which they are claimed."""
        self._claimed: OrderedDict[int, Lease] = OrderedDict()
        """In the order of their deadlines: all leases are equally long, and a renewed one moves to the end."""
        self._completed: dict[int, Lease] = {}
        self._held_by: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self._tried: dict[int, Tries] = {}
        """By unit: failed attempts, which outlive their version."""
        self._ages: OrderedDict[int, None] = OrderedDict()
        """Claimed units in the order of their claims, whatever their renewals."""
        self._times: deque[float] = deque(maxlen=_LAST_TIMES)
        self._managed: Counter[str] = Counter()
        """By worker: completed units of older versions."""
        self._failed: Counter[str] = Counter()
        """By worker: failed attempts."""
        self._last: dict[str, tuple[tuple[int, int], str]] = {}
        """By worker: unit and version of its last result, and the outcome, to recognise a repeated result."""
        self._usual_s: dict[str, float] = {}
        """By worker: a running mean of its times for a unit."""
        self._totals = {"issued": 0, "completed": 0, "cancelled": 0}
        """Units issued in all versions, and the fate of those of older versions."""

    # --- the coordinator's side ----------------------------------------------------------------------

    def issue(self, version: int, units: Sequence[int], quorum: int | None, now: float, most_lag: int = 0) -> list[GivenUp]:
        """Offer units, in this order. A new version cancels what is pending, and leases that lag more than `most_lag` versions; the same
        version again adds units.

        Leased units and given-up units stay as they are. A unit with a result of this version is listed again because the result could
        not be used: that counts as a failed attempt. With `quorum` results of a version no more units are leased; what is leased then
        counts for the next version, or is late where no lag is allowed.
        """
        if version != self.version:
            self.oldest, self.most_lag = max(self.oldest, version - most_lag), most_lag
            self._cancel()
        self.version, self.quorum = version, quorum
        unusable = [unit for unit in units if unit in self._completed]
        new = [unit for unit in units if not any(unit in known for known in (self._completed, self._pending, self._claimed, self.given_up))]
        given_up = _only([self._count_attempt(self._completed.pop(unit), RESULT_WAS_UNUSABLE, now) for unit in unusable])
        self._pending.update(dict.fromkeys(new))
        self._totals["issued"] += len(new)
        return given_up

    def _cancel(self) -> None:
        for unit, lease in self._completed.items():
            self._tried.pop(unit, None)
            self._managed[lease.worker] += 1
        late = [lease for lease in self._claimed.values() if lease.version < self.oldest]
        self._totals["completed"] += len(self._completed)
        self._totals["cancelled"] += len(self._pending) + len(late)
        for units in (self._completed, self._pending):
            units.clear()
        for lease in late:
            self._end(lease)

    def expire(self, now: float) -> list[GivenUp]:
        """End the leases whose deadline has passed: their units are pending again, at the end, or given up."""
        ended = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            ended.append(self._fail(next(iter(self._claimed.values())), NO_RESULT_IN_TIME, now))
        return _only(ended)

    def next_deadline(self) -> float | None:
        """When the first lease expires, if it is not renewed; None: there is no lease."""
        return next(iter(self._claimed.values())).deadline if self._claimed else None

    def lose(self, worker: str, now: float) -> list[GivenUp]:
        """Take back the units of a worker that disappeared. They count as failed, since a unit may be what kills workers."""
        return _only([self._fail(lease, WORKER_IS_GONE, now) for lease in self.held(worker)])

    def take_from_slowest(self, worker: str, now: float) -> tuple[Lease, GivenUp | None] | None:
        """Take away the unit that another worker has held for too long (heartbeats renew a lease without end), as this worker is idle."""
        lease = next((self._claimed[unit] for unit in self._ages if self._claimed[unit].worker != worker), None)
        if lease is None or self.enough or now - lease.since <= self.lease_s or self._version_is_near(worker, now):
            return None
        if self._times and now - lease.since <= _TIMES_AS_LONG * median(self._times):
            return None
        return lease, self._fail(lease, HELD_TOO_LONG, now)

    @property
    def enough(self) -> bool:
        """Whether this version has its quorum of results."""
        return self.quorum is not None and len(self._completed) >= self.quorum

    @property
    def _is_full(self) -> bool:
        """Whether a further result would be too late: it could only count for the next version."""
        return self.enough and self.most_lag == 0

    def counts(self) -> dict[str, int]:
        """Units by state, over all versions; they add up to `issued`."""
        completed = self._totals["completed"] + len(self._completed)
        open_now = {"pending": len(self._pending), "claimed": len(self._claimed)}
        return self._totals | open_now | {"completed": completed, "failed": len(self.given_up)}

    # --- a worker's side -----------------------------------------------------------------------------

    @property
    def any_waits(self) -> bool:
        """Whether there is a pending unit, though not for each worker."""
        return bool(self._pending) and not self.enough

    def claim(self, worker: str, now: float) -> Lease | None:
        """Lease the unit that has waited longest. None: there is none for this worker, or the next version is there or near.

        A unit that the worker failed is left to others that are present, until all have tried it or a lease's time has passed. A unit with
        enough failed attempts comes back to it once in a lease's time.
        """
        waiting = self._pending if self.any_waits and not self._version_is_near(worker, now) else ()
        unit = next((unit for unit in waiting if self._may_try(unit, worker, now)), None)
        if unit is None:
            return None
        del self._pending[unit]
        lease = Lease(unit, self.version, worker, self._attempts_at(unit) + 1, now + self.lease_s, now)
        self._claimed[unit] = lease
        self._ages[unit] = None
        self._held_by[worker][unit] = None
        if worker in self._last and self._last[worker][0] == (unit, self.version):
            del self._last[worker]  # the next result of this unit is a new one
        return lease

    def _version_is_near(self, worker: str, now: float) -> bool:
        """Whether this worker has delivered for the open round, and the rest that the round needs is expected soon."""
        usual_s = self._usual_s.get(worker, 0.0)
        last = self._last.get(worker)
        if self.per_version is None or usual_s < _SHORTEST_S or last is None or last[0][0] not in self._completed:
            return False
        until = now + usual_s * (_PATIENCE if self.most_lag else _PATIENCE_WITHOUT_LAG)
        missing = self.per_version - len(self._completed)
        return missing <= sum(self._is_due(self._claimed[unit], now, until) for unit in islice(self._ages, _MOST_EXPECTED))

    def _is_due(self, lease: Lease, now: float, until: float) -> bool:
        """Whether a result is expected before a time, and not overdue."""
        usual_s = self._usual_s.get(lease.worker)
        return usual_s is not None and now < lease.since + _OVERDUE * usual_s + _OVERDUE_S and lease.since + usual_s < until

    def _may_try(self, unit: int, worker: str, now: float) -> bool:
        tried = self._tried.get(unit)
        if tried is None or worker not in tried.last or tried.last[worker] + self.lease_s <= now:
            return True
        return tried.count < self.attempts and all(name in tried.last for name in self.present())

    def _attempts_at(self, unit: int) -> int:
        return self._tried[unit].count if unit in self._tried else 0

    def held(self, worker: str) -> list[Lease]:
        """Leases of a worker, oldest first."""
        return [self._claimed[unit] for unit in self._held_by.get(worker, ())]

    def holds(self, worker: str, unit: int, now: float) -> bool:
        """Whether the worker's result of this unit would be accepted now."""
        lease = self._lease(worker, unit)
        return lease is not None and now < lease.deadline and not self._is_full

    def renew(self, worker: str, now: float) -> None:
        """Extend the leases of a worker to a whole lease from now on. A lease that has ended stays ended."""
        for lease in self.held(worker):
            if now < lease.deadline:
                self._claimed[lease.unit] = lease._replace(deadline=now + self.lease_s)
                self._claimed.move_to_end(lease.unit)

    def submit(self, worker: str, unit: int, version: int, now: float) -> str:
        """The outcome of a result: accepted, late or cancelled. A repeated result has the outcome of the first."""
        last = self._last.get(worker)
        if last is not None and last[0] == (unit, version):
            return last[1]
        outcome = CANCELLED if version < self.oldest else self._submit(worker, unit, version, now)
        self._last[worker] = (unit, version), outcome
        self.workers[worker]["completed" if outcome == ACCEPTED else outcome] += 1
        return outcome

    def _submit(self, worker: str, unit: int, version: int, now: float) -> str:
        lease = self._lease(worker, unit)
        if lease is None or version != lease.version or now >= lease.deadline:
            return LATE
        self._end(lease)
        if self._is_full:
            self._pending[unit] = None
            return LATE
        self._completed[unit] = lease
        took_s = now - lease.since
        self._times.append(took_s)
        self._usual_s[worker] = (1 - _NEWEST) * self._usual_s.get(worker, took_s) + _NEWEST * took_s
        return ACCEPTED

    def waits_for_reliable_worker(self, unit: int) -> bool:
        """Whether a unit failed as often as it may, and waits as no reliable worker is present."""
        return self._attempts_at(unit) >= self.attempts and not any(self._is_reliable(name) for name in self.present())

    def give_back(self, worker: str, unit: int) -> None:
        """Return a unit; it does not count as an attempt."""
        if (lease := self._lease(worker, unit)) is not None:
            self._end(lease)
            self._pending[unit] = None

    def leave(self, worker: str) -> None:
        """Give back all units of a worker."""
        for lease in self.held(worker):
            self.give_back(worker, lease.unit)

    def forget(self, worker: str) -> None:
        """Forget an unused name, so that ever new names do not fill the memory."""
        for known in (self.workers, self._held_by, self._managed, self._failed, self._last, self._usual_s):
            known.pop(worker, None)

    def fail(self, worker: str, unit: int, reason: str, now: float) -> GivenUp | None:
        """Count a failed attempt: another worker tries the unit, unless it is given up."""
        lease = self._lease(worker, unit)
        return self._fail(lease, reason, now) if lease is not None else None

    # --- how a lease ends ----------------------------------------------------------------------------

    def _lease(self, worker: str, unit: int) -> Lease | None:
        lease = self._claimed.get(unit)
        return lease if lease is not None and lease.worker == worker else None

    def _end(self, lease: Lease) -> None:
        del self._claimed[lease.unit], self._ages[lease.unit], self._held_by[lease.worker][lease.unit]

    def _fail(self, lease: Lease, reason: str, now: float) -> GivenUp | None:
        self._end(lease)
        self.workers[lease.worker]["failed"] += 1
        return self._count_attempt(lease, reason, now)

    def _count_attempt(self, lease: Lease, reason: str, now: float) -> GivenUp | None:
        """Make the unit pending again, or give it up."""
        unit = lease.unit
        self._tried.setdefault(unit, Tries(now)).add(lease.worker, now)
        self._failed[lease.worker] += 1
        if not self._is_hopeless(self._tried[unit], now):
            self._pending[unit] = None
            return None
        del self._tried[unit]
        self.given_up[unit] = reason
        return GivenUp(unit, reason)

    def _is_hopeless(self, tried: Tries, now: float) -> bool:
        """Whether a unit is to be given up; see the module's "Holds"."""
        if tried.count < self.attempts:
            return False
        has_waited = tried.first_at + self.patience_s <= now
        reliable = {name for name in self.present() if self._is_reliable(name)}
        if not reliable:
            return has_waited
        tried_by = {name for name in tried.times if self._is_reliable(name)}
        is_tried_enough = sum(tried.times[name] for name in tried_by) >= self.attempts
        return is_tried_enough and (has_waited or reliable <= tried_by or len(tried_by) >= self.attempts)

    def _is_reliable(self, worker: str) -> bool:
        return self._managed[worker] > self._failed[worker]


def _only(found: Iterable[GivenUp | None]) -> list[GivenUp]:
    return [given_up for given_up in found if given_up is not None]
