"""Seconds that each phase of a step takes.

On a CUDA GPU the phases are measured by events in its own stream, since the program runs ahead of it; they are read when the figures are
recorded, so no step waits for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MOST_EVENTS = 4096
"""Events that may be unread; then those of finished work are read."""


class PhaseTimes:
    """Adds up the seconds of phases. Holds: every moment between two calls of `mark` belongs to one phase, or to none."""

    def __init__(self, device: torch.device) -> None:
        self.enabled = False
        """Only where a loop reads the sums."""
        self._on_gpu = device.type == "cuda"
        self._sums: dict[str, float] = {}
        self._phase, self._since = "", 0.0
        self._events: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """A phase of the device's work begins, and the one before ends. Empty: what follows belongs to none."""
        if not self.enabled:
            return
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append((phase, event))
            if len(self._events) > _MOST_EVENTS:
                self._read()
            return
        now = time.perf_counter()
        if self._phase:
            self._add(self._phase, now - self._since)
        self._phase, self._since = phase, now

    @contextmanager
    def on_host(self, phase: str) -> Iterator[None]:
        """A phase of the program itself, which the device may use for its work."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.enabled:
                self._add(phase, time.perf_counter() - began)

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last call."""
        if self._events:
            self._events[-1][1].synchronize()
            self._read()
        sums, self._sums = self._sums, {}
        return sums

    def _read(self) -> None:
        """Add up the time between events that the GPU has passed."""
        while len(self._events) > 1 and self._events[1][1].query():  # type: ignore[no-untyped-call]
            (phase, begun), (_, ended) = self._events.pop(0), self._events[0]
            if phase:
                self._add(phase, begun.elapsed_time(ended) / 1000)

    def _add(self, phase: str, seconds: float) -> None:
        self._sums[phase] = self._sums.get(phase, 0.0) + seconds
