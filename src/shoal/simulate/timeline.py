"""Virtual time: a heap of things that happen, one after the other."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Timeline:
    """Things happen in the order of their times, and those of the same time in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, moment: float, what: Callable[..., None], *given: Any) -> None:
        """Have something happen at a moment; now, where that has passed."""
        heapq.heappush(self._heap, (max(self.now, moment), next(self._order), what, given))

    def after(self, delay_s: float, what: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), what, given))

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Let things happen until this time, or until it is over."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until and not over():
            self.now, _, what, given = pop(heap)
            what(*given)
        if not over():
            self.now = until
