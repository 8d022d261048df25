"""The event queue of virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

_Planned = tuple[float, float, Callable[..., None], tuple[Any, ...]]
"""When, which of those that were planned, what, and what it is given."""


class EventQueue:
    """Runs events in the order of their times; events of the same time in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[_Planned] = []
        self._line: deque[_Planned] = deque()
        """What was planned in the order in which it happens: that needs no heap."""
        self._order = itertools.count()
        self._stopped, self._runs = False, 0

    def at(self, moment: float, what: Callable[..., None], *given: Any) -> None:
        """Have something happen at a moment; now, where that has passed."""
        heapq.heappush(self._heap, (max(self.now, moment), next(self._order), what, given))

    def after(self, delay_s: float, what: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), what, given))

    def in_line(self, moment: float, what: Callable[..., None], *given: Any) -> None:
        """As `at`, for things that mostly happen in the order in which they are planned, as all do that are planned with the same delay."""
        line = self._line
        if not line or line[-1][0] <= moment:
            line.append((moment, next(self._order), what, given))
        else:
            self.at(moment, what, *given)

    def stop(self) -> None:
        """Let nothing more happen in this `run`."""
        self._stopped = True

    def _time_is_up(self, run: int) -> None:
        if run == self._runs:  # else an earlier run was stopped before its time
            self.stop()

    def run(self, until: float) -> None:
        """Let things happen until this time, or until `stop` is called."""
        heap, line, pop, take = self._heap, self._line, heapq.heappop, self._line.popleft
        self._stopped = False
        self._runs += 1
        heapq.heappush(
            self._heap, (until, math.inf, self._time_is_up, (self._runs,))
        )  # after all else; so there is always something to come
        while not self._stopped:
            self.now, _, what, given = take() if line and line[0] < heap[0] else pop(heap)
            what(*given)
