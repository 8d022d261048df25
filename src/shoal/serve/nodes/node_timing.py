"""The deadline of a machine that holds layers, from the times that the server measured.

The deadline is generous: a machine that is healthy and busy must not be removed, and one that does nothing must not stop a service.
"""

from __future__ import annotations

import statistics
from collections import deque

from shoal.serve.nodes.layer_host import LayerRange, TokenBatch

GRACE_S = 10.0
"""A machine is not late before: a busy one may do nothing for seconds."""
_LATE_FACTOR = 20.0
"""Beyond the grace, a machine may take this many times its median time."""
_MEDIAN_OF = 32
_MOST_LAYER_S = 2.0
"""Longest claimed time for a token in a layer that counts: a machine must not choose its own deadline."""
_ATTENTION_TOKENS = 1024
"""Tokens before a token for which it counts twice, since it attends to them."""
_LOAD_S, _LOAD_BYTES_PER_S = 60.0, 1e6
"""Loading layers may take this long, and longer by their size: a slow line receives 8 Mbit/s."""
_MOST_SENT = 1024
SLOW_S = 1.0
_SLOW_FACTOR, _SLOW_BATCHES = 10.0, 8
"""A machine is slow if, at the median, its last batches took this many times what it claims, and a second more."""


def work_of(batch: TokenBatch, cost: float) -> float:
    """The work of a batch: tokens times layers of mean size."""
    length = len(batch.ids[0])
    return cost * sum(length * (1 + (position + length) / _ATTENTION_TOKENS) for position in batch.positions)


class NodeTiming:
    """What a machine was sent and has not reported, and how long it took for what it did report."""

    def __init__(self, layer_s: float) -> None:
        """`layer_s`: what the machine claims to take for a token in a layer."""
        self.reported_at = float("-inf")
        """When it last reported something that it was sent."""
        self._claimed_s = min(layer_s, _MOST_LAYER_S)
        self._measured = deque[float](maxlen=_MEDIAN_OF)
        self._beyond_claim = deque[float](maxlen=_SLOW_BATCHES)
        self._sent: dict[int, float] = {}
        self._loading: dict[LayerRange, tuple[float, float]] = {}
        self._unnumbered_work = 0.0

    def sent(self, number: int, work: float) -> None:
        """The machine was sent a batch. The report of a batch with a negative number never comes: its work counts to the next one."""
        if number < 0:
            self._unnumbered_work += work
            return
        self._sent[number] = work + self._unnumbered_work
        self._unnumbered_work = 0.0
        if len(self._sent) > _MOST_SENT:
            del self._sent[next(iter(self._sent))]

    def reported(self, number: int, since: float, now: float) -> float:
        """The machine reported a batch whose input it had since then. Return the seconds that it took, without earlier batches."""
        if number not in self._sent:  # a report that was made up must not move the deadline
            return 0.0
        seconds, work = now - max(since, self.reported_at), self._sent[number]
        self.reported_at = now
        self._sent = {one: work for one, work in self._sent.items() if one > number}  # what it skipped is not reported later
        if work:
            self._measured.append(seconds / work)
            self._beyond_claim.append(seconds - _SLOW_FACTOR * self._claimed_s * work)
        return seconds

    def loads(self, layers: LayerRange, size: int, now: float) -> None:
        self._loading[layers] = (now, _LOAD_S + size / _LOAD_BYTES_PER_S)

    def loaded(self, layers: LayerRange, now: float) -> None:
        """The machine loaded layers, or reported that it could not."""
        if self._loading.pop(layers, None) is not None:
            self.reported_at = now

    def allowed_s(self) -> float:
        """How long it may take to report anything, with all that it was sent."""
        work_s = statistics.median(self._measured) if self._measured else self._claimed_s
        loading_s = sum(seconds for _, seconds in self._loading.values())
        return GRACE_S + loading_s + _LATE_FACTOR * work_s * (sum(self._sent.values()) + self._unnumbered_work)

    def is_late(self, since: float, now: float, share: float = 1.0) -> bool:
        """Whether a batch whose input it had since then should have been reported."""
        return now - max(since, self.reported_at) > share * self.allowed_s()

    def is_slow(self) -> bool:
        return len(self._beyond_claim) == _SLOW_BATCHES and statistics.median(self._beyond_claim) > SLOW_S

    def is_late_to_load(self, now: float) -> bool:
        since = min((since for since, _ in self._loading.values()), default=now)
        return self.is_late(since, now)
