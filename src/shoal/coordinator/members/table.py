"""Members of the run: sessions, heartbeats, seats at the data, smoothed speeds. What every message needs is found in constant time."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MISSED_HEARTBEATS = 3
"""Heartbeat intervals without a message after which a worker counts as dead."""
JOINING, COMPUTING = "joining", "computing"
"""States of a worker, for the user: later it says its own."""
MOST_NAMES = 100_000
"""Bound on remembered names, so that a client that joins under ever new names cannot fill the memory."""

_MOST_REPLACED, _MOST_LOST = 16, 1000
"""Processes that are remembered of each name, and names of workers that fell silent."""


@dataclass
class Member:
    """A worker, from joining to leaving."""

    name: str
    session: str
    seat: int
    seen_at: float
    joined_at: float = 0.0
    address: str = ""
    """Network address as the transport sees it; empty: unknown."""
    about: Mapping[str, str] = field(default_factory=dict)
    instance: str = ""
    challenge: int = 0
    """Number of the challenge that it answered when it joined."""
    guest: str = ""
    """Person on whose invitation it joined; empty: it has the run's own token."""
    workers: int = 1
    """Workers that compute behind it: those of a relay."""
    experts: tuple[int, ...] = ()
    """Experts of a mixture that it holds; empty: all of them."""
    seen_seq: int = -1
    seen_place: tuple[int, int] = (0, 0)
    """Epoch and batch of its last contribution, accepted or not, as `seen_seq` is its number."""
    failed: int = 0
    """Units in a row that it failed."""
    warning: str = ""
    """Text for the reply to its next heartbeat."""
    state: str = JOINING
    numbers: dict[bool, int] = field(default_factory=lambda: {False: -1, True: -1})
    """Last message number, of heartbeats (True) and of other messages (False). A message with an older number is a replay."""
    arrived_at: float | None = None
    interval_s: float | None = None
    """Smoothed time between its contributions."""
    began_at: float | None = None
    """When it got the weights that it computes on now."""
    pace: float | None = None
    """Smoothed batches per second from weights to contribution, without the time that it waited for others."""
    batches: int = 1
    """Batches of its last contribution."""
    lag: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of its last heartbeat."""
    accepted: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Rejected contributions by reason."""
    received_bytes: int = 0

    def reject(self, reason: str) -> None:
        """Count a rejected contribution."""
        self.rejected += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    @property
    def rate(self) -> float | None:
        return 1.0 / self.interval_s if self.interval_s else None


class Seats:
    """Seats at the data. A freed seat is the first to be given away, so that no shard stays without a worker."""

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self._left: list[int] = []
        """Heap of freed seats; some may be taken again."""
        self._listed: set[int] = set()
        self._beyond = 0
        """No seat from this number on was ever freed."""

    def take(self, wanted: int | None) -> int:
        """The wanted seat if it is free, otherwise the first free one."""
        seat = self._first() if wanted is None or wanted in self.taken else wanted
        self.taken.add(seat)
        return seat

    def _first(self) -> int:
        while self._left:
            seat = heapq.heappop(self._left)
            self._listed.remove(seat)
            if seat not in self.taken:
                return seat
        while self._beyond in self.taken:
            self._beyond += 1
        return self._beyond

    def leave(self, seat: int) -> None:
        self.taken.discard(seat)
        if seat < self._beyond and seat not in self._listed:
            heapq.heappush(self._left, seat)
            self._listed.add(seat)


class SortedRates:
    """Workers' rates in order: median and maximum in constant time."""

    def __init__(self) -> None:
        self._sorted: list[float] = []

    def move(self, old: float | None, new: float | None) -> None:
        if old is not None:
            del self._sorted[bisect_left(self._sorted, old)]
        if new is not None:
            insort(self._sorted, new)

    @property
    def largest(self) -> float:
        return self._sorted[-1]

    def speed(self, rate: float | None) -> float:
        """A rate over the median; 1 while there are fewer than two."""
        count = len(self._sorted)
        if rate is None or count < 2:
            return 1.0
        return 2 * rate / (self._sorted[(count - 1) // 2] + self._sorted[count // 2])


class MemberTable:
    """All workers that take part now. Seats are remembered for workers that come back."""

    def __init__(self, heartbeat_interval_s: float, most_sessions: int = 10_000, most_failures: int = 5) -> None:
        self.heartbeat_interval_s, self.timeout_s = heartbeat_interval_s, MISSED_HEARTBEATS * heartbeat_interval_s
        self.most_sessions, self.most_failures = most_sessions, most_failures
        self.by_session: OrderedDict[str, Member] = OrderedDict()
        """In the order of their last messages, longest silent first."""
        self.by_name: dict[str, Member] = {}
        self.known: dict[str, int] = {}
        """The last seat of each name."""
        self.seats = Seats()
        self.rates = SortedRates()
        self.paces = SortedRates()
        self.guests: Counter[str] = Counter()
        """Workers that are here on each person's invitation."""
        self.replaced: dict[str, deque[str]] = {}
        """By name: the last processes that another process of this name replaced."""
        self.quarantined: OrderedDict[str, float] = OrderedDict()
        """Names that failed units which others manage, and until when they are kept out."""
        self.quarantined_guests: dict[str, float] = {}
        """People on whose invitation such a worker joined, and until when no newcomer may join on it."""
        self.lost: OrderedDict[str, None] = OrderedDict()
        """Names of workers that fell silent and have not come back, the last ones last."""
        self._named = 0

    def add(
        self,
        name: str,
        session: str,
        about: Mapping[str, str],
        now: float,
        instance: str = "",
        guest: str = "",
        seat: int | None = None,
    ) -> Member:
        """`seat`: None for the seat that the name had last, or the first free one."""
        seat = self.seats.take(self.known.get(name)) if seat is None else seat
        worker = Member(name, session, seat, now, now, about=about, instance=instance, guest=guest)
        self.guests[guest] += 1
        self.by_session[session] = self.by_name[name] = worker
        self.lost.pop(name, None)
        return worker

    def mark_lost(self, worker: Member) -> None:
        """Remember a worker that fell silent."""
        self.lost[worker.name] = None
        if len(self.lost) > _MOST_LOST:
            self.lost.popitem(last=False)

    def remove(self, worker: Member) -> None:
        self.by_session.pop(worker.session, None)
        self.seats.leave(worker.seat)
        self.rates.move(worker.rate, None)
        self.paces.move(worker.pace, None)
        self.guests[worker.guest] -= 1
        worker.interval_s = worker.pace = None
        if self.by_name.get(worker.name) is worker:
            del self.by_name[worker.name]

    def mark_replaced(self, worker: Member) -> None:
        """Remember a process whose name another process has taken, so that it does not rejoin and replace that one in turn."""
        self.replaced.setdefault(worker.name, deque(maxlen=_MOST_REPLACED)).append(worker.instance)

    def quarantine(self, name: str, guest: str, until: float) -> None:
        self.quarantined.pop(name, None)
        self.quarantined[name] = until
        if guest:
            self.quarantined_guests[guest] = until

    def next_released(self, now: float) -> str | None:
        """Take a name from the quarantine whose time is over, or the oldest one if the list is too long."""
        name, until = next(iter(self.quarantined.items()), ("", now))
        if not name or (until > now and len(self.quarantined) <= self.most_sessions):
            return None
        del self.quarantined[name]
        return name

    def has_room_for(self, name: str) -> bool:
        if name in self.by_name:
            return True
        return len(self.by_name) < self.most_sessions and (name in self.known or len(self.known) < max(MOST_NAMES, self.most_sessions))

    def touch(self, worker: Member, now: float) -> None:
        """Note that a worker sent a message."""
        worker.seen_at = now
        self.by_session.move_to_end(worker.session)

    def next_silent(self, now: float) -> Member | None:
        """A worker that has been silent for too long, if there is any."""
        first = next(iter(self.by_session.values()), None)
        return first if first is not None and now - first.seen_at > self.timeout_s else None

    def at_work(self) -> Iterator[str]:
        """Names of the workers that have not failed too many units in a row."""
        return (name for name, worker in self.by_name.items() if worker.failed < self.most_failures)

    def measure_rate(self, worker: Member, now: float, alpha: float) -> None:
        """Smooth the time between a worker's contributions, when one arrives."""
        if worker.arrived_at is not None and now > worker.arrived_at:
            passed, before = now - worker.arrived_at, worker.rate
            worker.interval_s = passed if worker.interval_s is None else alpha * passed + (1 - alpha) * worker.interval_s
            self.rates.move(before, worker.rate)
        worker.arrived_at = now

    def measure_pace(self, worker: Member, batches: int, now: float, alpha: float) -> None:
        """Smooth a worker's batches per second, when a contribution arrives."""
        if worker.began_at is not None and now > worker.began_at:
            pace, before = batches / (now - worker.began_at), worker.pace
            worker.pace = pace if before is None else alpha * pace + (1 - alpha) * before
            self.paces.move(before, worker.pace)
        worker.began_at, worker.batches = None, batches

    def free_name(self) -> str:
        while True:
            self._named += 1
            name = f"worker-{self._named}"
            if name not in self.known and name not in self.by_name:
                return name

    def speed(self, worker: Member) -> float:
        """A worker's rate over the median rate; 1 until it is known."""
        return self.rates.speed(worker.rate)

    def table(self) -> list[dict[str, Any]]:
        """One row per worker, for the user."""
        return [
            {
                "worker": worker.name,
                "state": worker.state,
                "rate": worker.rate,
                "lag": worker.lag,
                "accepted": worker.accepted,
                "rejected": worker.rejected,
                "bytes": worker.received_bytes,
                **{key: worker.about[key] for key in ("device", "system") if key in worker.about},
            }
            for worker in self.by_name.values()
        ]
