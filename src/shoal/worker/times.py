"""How a worker's time divides, for people: computing, waiting for answers, and handing over updates."""

from __future__ import annotations

from collections.abc import Callable


class Times:
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
