"""Who takes part: sessions, signs of life, seats at the data, and smoothed speeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MISSED_HEARTBEATS = 3
"""A worker that has been silent for so many intervals is taken for dead."""
MOST_SESSIONS = 10_000


@dataclass
class Worker:
    """One worker, from its joining to its leaving."""

    name: str
    session: str
    seat: int
    seen_at: float
    about: Mapping[str, str] = field(default_factory=dict)
    active: bool = False
    """It has pulled weights, so rounds wait for it."""
    state: str = "joining"
    numbers: dict[bool, int] = field(default_factory=lambda: {False: -1, True: -1})
    """The last message number, of heartbeats and of all else: a message that was seen before is not taken again."""
    arrived_at: float | None = None
    interval_s: float | None = None
    """Smoothed time between its contributions."""
    lag: int = 0
    accepted: int = 0
    rejected: int = 0
    received_bytes: int = 0

    @property
    def rate(self) -> float | None:
        return 1.0 / self.interval_s if self.interval_s else None

    def arrive(self, now: float, alpha: float) -> None:
        """Measure the time since its last contribution."""
        if self.arrived_at is not None and now > self.arrived_at:
            passed = now - self.arrived_at
            self.interval_s = passed if self.interval_s is None else alpha * passed + (1 - alpha) * self.interval_s
        self.arrived_at = now


class Membership:
    """All workers that are here, by session. Seats and sequence numbers are remembered for those that come back."""

    def __init__(self, heartbeat_interval_s: float) -> None:
        self.timeout_s = MISSED_HEARTBEATS * heartbeat_interval_s
        self.by_session: dict[str, Worker] = {}
        self.by_name: dict[str, Worker] = {}
        self.seats: dict[str, int] = {}
        """The seat each name had last."""

    def add(self, name: str, session: str, seat: int, about: Mapping[str, str], now: float) -> Worker:
        worker = Worker(name, session, seat, now, about)
        self.by_session[session] = self.by_name[name] = worker
        return worker

    def remove(self, worker: Worker) -> None:
        self.by_session.pop(worker.session, None)
        if self.by_name.get(worker.name) is worker:
            del self.by_name[worker.name]

    def active(self) -> list[Worker]:
        return [worker for worker in self.by_name.values() if worker.active]

    def silent(self, now: float) -> list[Worker]:
        return [worker for worker in self.by_name.values() if now - worker.seen_at > self.timeout_s]

    def free_seat(self, name: str) -> int:
        """The seat it had, if nobody has taken it; else the first one that is free."""
        taken = {worker.seat for worker in self.by_name.values() if worker.name != name}
        before = self.seats.get(name)
        if before is not None and before not in taken:
            return before
        return next(seat for seat in range(len(taken) + 1) if seat not in taken)

    def free_name(self) -> str:
        known = self.seats.keys() | self.by_name.keys()
        return next(name for number in range(1, len(known) + 2) if (name := f"worker-{number}") not in known)

    def speed(self, worker: Worker) -> float:
        """A worker's rate over the median rate; 1 until it is known."""
        rates = [rate for one in self.by_name.values() if (rate := one.rate) is not None]
        rate = worker.rate
        return 1.0 if rate is None or len(rates) < 2 else rate / statistics.median(rates)

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
