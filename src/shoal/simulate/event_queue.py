"""The event queue of virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

_Event = tuple[float, float, Callable[..., None], tuple[Any, ...]]
"""Time, sequence number, callback and its arguments."""


class EventQueue:
    """Runs events in the order of their times; events of the same time in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[_Event] = []
        self._fifo: deque[_Event] = deque()
        """Events that were scheduled in the order of their times; these need no heap."""
        self._order = itertools.count()
        self._stopped, self._runs = False, 0

    def at(self, moment: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call for a time; for now, if that time has passed."""
        heapq.heappush(self._heap, (max(self.now, moment), next(self._order), call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), call, arguments))

    def at_in_order(self, moment: float, call: Callable[..., None], *arguments: Any) -> None:
        """Like `at`, and faster for events that are mostly scheduled in the order of their times, such as all with the same delay."""
        if not self._fifo or self._fifo[-1][0] <= moment:
            self._fifo.append((moment, next(self._order), call, arguments))
        else:
            self.at(moment, call, *arguments)

    def stop(self) -> None:
        """Make `run` return after the present event."""
        self._stopped = True

    def _time_is_up(self, run: int) -> None:
        if run == self._runs:  # else it is left from an earlier `run` that was stopped
            self.stop()

    def run(self, until: float) -> None:
        """Process events until this time, or until `stop` is called."""
        heap, fifo, pop = self._heap, self._fifo, heapq.heappop
        self._stopped = False
        self._runs += 1
        heapq.heappush(heap, (until, math.inf, self._time_is_up, (self._runs,)))  # the last event of its time, so the heap is never empty
        while not self._stopped:
            self.now, _, call, arguments = fifo.popleft() if fifo and fifo[0] < heap[0] else pop(heap)
            call(*arguments)
