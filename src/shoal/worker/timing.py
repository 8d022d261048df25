"""Timing of a worker, for reports: seconds spent computing, waiting for answers and sending updates; latency and bandwidth of its link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

_TELLING_BYTES = 32 << 10
"""Shorter answers are not used to measure bandwidth."""


class WorkerTimes:
    """Seconds spent on each kind of activity since the worker began, including the current one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.doing = clock, ""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = clock()
        self.phases: Mapping[str, float] = {}
        """Seconds of each phase of computing. It is replaced and never changed, since heartbeats read it in a thread of their own."""

    def begin(self, doing: str) -> float:
        """End the current activity and begin another one; empty: none that is reported. Returns the current time."""
        now = self.clock()
        self._seconds[self.doing] += now - self._since
        self._since, self.doing = now, doing
        return now

    def spent(self, activity: str) -> float:
        """The seconds spent on an activity."""
        return self._seconds[activity] + (max(0.0, self.clock() - self._since) if activity == self.doing else 0.0)

    def add_phases(self, seconds: Mapping[str, float]) -> None:
        before = self.phases
        self.phases = {**before, **{name: before.get(name, 0.0) + value for name, value in seconds.items()}}


class LinkMeasurements:
    """Measurements of the link to the coordinator: the lowest latency of a heartbeat, and the highest bandwidth in bytes per second."""

    def __init__(self) -> None:
        self._latency_s: float | None = None
        self._bytes_per_s: float | None = None

    def answered(self, seconds: float) -> None:
        """Record the round-trip time of a heartbeat."""
        self._latency_s = seconds if self._latency_s is None else min(self._latency_s, seconds)

    def carried(self, size: int, seconds: float) -> None:
        """Record that an answer of `size` bytes arrived `seconds` after its request, with no waiting at the coordinator in between."""
        if size >= _TELLING_BYTES:
            rate = size / max(1e-6, seconds - (self._latency_s or 0.0))
            self._bytes_per_s = rate if self._bytes_per_s is None else max(self._bytes_per_s, rate)

    @property
    def figures(self) -> dict[str, float]:
        latency = {} if self._latency_s is None else {"latency_ms": 1e3 * self._latency_s}
        return latency | ({} if self._bytes_per_s is None else {"bandwidth_mbps": 8e-6 * self._bytes_per_s})
