"""Timing of a worker, for reports: seconds spent computing, waiting for answers and sending updates; latency and bandwidth of its link."""

from __future__ import annotations

from collections.abc import Callable

_TELLING_BYTES = 32 << 10
"""Shorter answers are not used to measure bandwidth."""


class WorkerTimes:
    """Seconds spent on each kind of activity since the worker began, including the current one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.waited_s = 0.0
        self._computed_s = self._sent_s = 0.0
        self._since, self._doing = clock(), ""

    def begin(self, doing: str) -> float:
        """Begin an activity, computing or waiting. Returns the current time."""
        self._since, self._doing = self.clock(), doing
        return self._since

    def computed(self, seconds: float) -> None:
        self._computed_s += seconds
        self._doing = ""

    def waited(self) -> None:
        """End waiting: the answer has arrived."""
        self.waited_s += self.clock() - self._since
        self._doing = ""

    def sent(self, seconds: float) -> None:
        """Add the time that encoding or sending an update took."""
        self._sent_s += seconds

    def figures(self, computing: str, waiting: str) -> dict[str, float]:
        """The seconds by activity. `computing`, `waiting`: the names of those activities."""
        going_on, doing = max(0.0, self.clock() - self._since), self._doing
        return {
            "computing_s": self._computed_s + (going_on if doing == computing else 0.0),
            "idle_s": self.waited_s + (going_on if doing == waiting else 0.0),
            "sending_s": self._sent_s,
        }


class LinkMeasurements:
    """Measurements of the link to the coordinator: the lowest latency of a heartbeat, and the highest bandwidth in bytes per second."""

    def __init__(self) -> None:
        self._latency_s: float | None = None
        self._bytes_per_s: float | None = None

    def answered(self, seconds: float) -> None:
        """Record the round-trip time of a heartbeat."""
        self._latency_s = seconds if self._latency_s is None else min(self._latency_s, seconds)

    def carried(self, size: int, seconds: float) -> None:
        """Record that an answer of `size` bytes arrived `seconds` after its request, without the coordinator waiting for anything in
        between."""
        if size >= _TELLING_BYTES:
            rate = size / max(1e-6, seconds - (self._latency_s or 0.0))
            self._bytes_per_s = rate if self._bytes_per_s is None else max(self._bytes_per_s, rate)

    @property
    def figures(self) -> dict[str, float]:
        latency = {} if self._latency_s is None else {"latency_ms": 1e3 * self._latency_s}
        return latency | ({} if self._bytes_per_s is None else {"bandwidth_mbps": 8e-6 * self._bytes_per_s})
