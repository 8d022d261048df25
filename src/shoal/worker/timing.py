"""How a worker's time divides, for people: computing, waiting for answers, and handing over updates; and what its link was seen to do."""

from __future__ import annotations

from collections.abc import Callable

_TELLING_BYTES = 32 << 10
"""An answer that is shorter says nothing of how many bytes a link carries in a second."""


class WorkerTimes:
    """Seconds of each kind since the worker began, what goes on now included."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.waited_s = 0.0
        self._computed_s = self._sent_s = 0.0
        self._since, self._doing = clock(), ""

    def begin(self, doing: str) -> float:
        """The worker begins to compute or to wait; the time."""
        self._since, self._doing = self.clock(), doing
        return self._since

    def computed(self, seconds: float) -> None:
        self._computed_s += seconds
        self._doing = ""

    def waited(self) -> None:
        """The answer is there."""
        self.waited_s += self.clock() - self._since
        self._doing = ""

    def sent(self, seconds: float) -> None:
        """An update was made ready for the way, or handed over."""
        self._sent_s += seconds

    def figures(self, computing: str, waiting: str) -> dict[str, float]:
        """`computing`, `waiting`: the names of what goes on."""
        going_on, doing = max(0.0, self.clock() - self._since), self._doing
        return {
            "computing_s": self._computed_s + (going_on if doing == computing else 0.0),
            "idle_s": self.waited_s + (going_on if doing == waiting else 0.0),
            "sending_s": self._sent_s,
        }


class LinkMeasurements:
    """What a worker's link to its coordinator was seen to do: the quickest answer to a sign of life, and the most bytes a second."""

    def __init__(self) -> None:
        self._latency_s: float | None = None
        self._bytes_per_s: float | None = None

    def answered(self, seconds: float) -> None:
        """A few bytes went there and back."""
        self._latency_s = seconds if self._latency_s is None else min(self._latency_s, seconds)

    def carried(self, size: int, seconds: float) -> None:
        """So many bytes came, so long after they were asked for. Nothing else was waited for."""
        if size >= _TELLING_BYTES:
            rate = size / max(1e-6, seconds - (self._latency_s or 0.0))
            self._bytes_per_s = rate if self._bytes_per_s is None else max(self._bytes_per_s, rate)

    @property
    def figures(self) -> dict[str, float]:
        latency = {} if self._latency_s is None else {"latency_ms": 1e3 * self._latency_s}
        return latency | ({} if self._bytes_per_s is None else {"bandwidth_mbps": 8e-6 * self._bytes_per_s})
