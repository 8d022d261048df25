"""Who takes part: sessions, signs of life, seats at the data, and smoothed speeds. What is asked at every message costs next to nothing."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MISSED_HEARTBEATS = 3
"""A worker that has been silent for so many intervals is taken for dead."""
MOST_NAMES = 100_000
"""Names that are remembered: whoever comes under ever new ones fills no memory."""

_MOST_REPLACED = 16


@dataclass
class Member:
    """One worker, from its joining to its leaving."""

    name: str
    session: str
    seat: int
    seen_at: float
    joined_at: float = 0.0
    address: str = ""
    """Where it is, as the transport sees it; empty: the transport does not know."""
    about: Mapping[str, str] = field(default_factory=dict)
    instance: str = ""
    challenge: int = 0
    """Which of the coordinator's challenges it answered when it joined."""
    guest: str = ""
    """Whose invitation let it in; empty: the run's own token."""
    experts: tuple[int, ...] = ()
    """The experts of a mixture that it holds; none: all of them."""
    seen_seq: int = -1
    seen_place: tuple[int, int] = (0, 0)
    """The last number, and epoch and batch, that it was seen to send, whatever became of it."""
    failed: int = 0
    """Units in a row that it could not do."""
    word: str = ""
    """What it is told with the answer to its next sign of life."""
    state: str = "joining"
    numbers: dict[bool, int] = field(default_factory=lambda: {False: -1, True: -1})
    """The last message number, of heartbeats and of all else: a message that was seen before is not taken again."""
    arrived_at: float | None = None
    interval_s: float | None = None
    """Smoothed time between its contributions."""
    began_at: float | None = None
    """When it was given the weights that it works on now."""
    pace: float | None = None
    """Smoothed batches a second, from weights to contribution: what it waited for others is not in it."""
    batches: int = 1
    """What its last contribution was made of."""
    lag: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    """What it told of itself lately."""
    accepted: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """How many of its contributions were turned away, by why."""
    received_bytes: int = 0

    def reject(self, reason: str) -> None:
        """Something that it sent was turned away."""
        self.rejected += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    @property
    def rate(self) -> float | None:
        return 1.0 / self.interval_s if self.interval_s else None


class Seats:
    """Seats at the data, of those who are here. A seat that becomes free is the first to be given away, so no shard is left alone."""

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self._left: list[int] = []
        """Seats that were left, smallest first; some may be taken again."""
        self._listed: set[int] = set()
        self._beyond = 0
        """No seat from here on was ever left."""

    def take(self, wanted: int | None) -> int:
        """The seat that is wanted, or the first free one."""
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
    """Workers' rates in order, so that the middle one and the largest are at hand."""

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
        """A rate over the median; 1 while there is nothing to compare it with."""
        count = len(self._sorted)
        if rate is None or count < 2:
            return 1.0
        return 2 * rate / (self._sorted[(count - 1) // 2] + self._sorted[count // 2])


class MemberTable:
    """All workers that are here. Seats and sequence numbers are remembered for those that come back."""

    def __init__(self, heartbeat_interval_s: float, most_sessions: int = 10_000) -> None:
        self.heartbeat_interval_s, self.timeout_s = heartbeat_interval_s, MISSED_HEARTBEATS * heartbeat_interval_s
        self.most_sessions = most_sessions
        self.by_session: OrderedDict[str, Member] = OrderedDict()
        """Who has been silent for longest comes first."""
        self.by_name: dict[str, Member] = {}
        self.known: dict[str, int] = {}
        """The seat each name had last."""
        self.seats = Seats()
        self.rates = SortedRates()
        self.paces = SortedRates()
        self.guests: Counter[str] = Counter()
        """Workers that are here on the invitation of each person."""
        self.replaced: dict[str, deque[str]] = {}
        """By name: the last processes whose place another one took."""
        self.quarantined: OrderedDict[str, float] = OrderedDict()
        """Names that failed what others manage, and until when they are kept out."""
        self.quarantined_guests: dict[str, float] = {}
        """People on whose invitation such a worker came, and until when no newcomer is let in on it."""
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
        """`seat`: where somebody else gives out the seats; None: the one that it had, or the first free one."""
        seat = self.seats.take(self.known.get(name)) if seat is None else seat
        worker = Member(name, session, seat, now, now, about=about, instance=instance, guest=guest)
        self.guests[guest] += 1
        self.by_session[session] = self.by_name[name] = worker
        return worker

    def remove(self, worker: Member) -> None:
        self.by_session.pop(worker.session, None)
        self.seats.leave(worker.seat)
        self.rates.move(worker.rate, None)
        self.paces.move(worker.pace, None)
        self.guests[worker.guest] -= 1
        worker.interval_s = worker.pace = None
        if self.by_name.get(worker.name) is worker:
            del self.by_name[worker.name]

    def replace(self, worker: Member) -> None:
        """Another process has taken a worker's name. If both came back whenever the other did, neither would get anything done."""
        self.replaced.setdefault(worker.name, deque(maxlen=_MOST_REPLACED)).append(worker.instance)

    def quarantine(self, name: str, guest: str, until: float) -> None:
        self.quarantined.pop(name, None)
        self.quarantined[name] = until
        if guest:
            self.quarantined_guests[guest] = until

    def released(self, now: float) -> str | None:
        """One who was kept out for long enough, or whose place in the list others need."""
        name, until = next(iter(self.quarantined.items()), ("", now))
        if not name or (until > now and len(self.quarantined) <= self.most_sessions):
            return None
        del self.quarantined[name]
        return name

    def has_room_for(self, name: str) -> bool:
        if name in self.by_name:
            return True
        return len(self.by_name) < self.most_sessions and (name in self.known or len(self.known) < max(MOST_NAMES, self.most_sessions))

    def hear(self, worker: Member, now: float) -> None:
        """A sign of life."""
        worker.seen_at = now
        self.by_session.move_to_end(worker.session)

    def silent(self, now: float) -> Member | None:
        """One who has not been heard for too long, if there is any."""
        first = next(iter(self.by_session.values()), None)
        return first if first is not None and now - first.seen_at > self.timeout_s else None

    def arrive(self, worker: Member, now: float, alpha: float) -> None:
        """A contribution came: measure the time since the last one."""
        if worker.arrived_at is not None and now > worker.arrived_at:
            passed, before = now - worker.arrived_at, worker.rate
            worker.interval_s = passed if worker.interval_s is None else alpha * passed + (1 - alpha) * worker.interval_s
            self.rates.move(before, worker.rate)
        worker.arrived_at = now

    def time(self, worker: Member, batches: int, now: float, alpha: float) -> None:
        """A contribution came: measure how fast it was made."""
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
        """One row per worker, for people."""
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
