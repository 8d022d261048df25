"""Limits on how fast a peer may send, a token bucket that refills with time, and on how slowly."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

SLOWEST_BYTES_PER_S = 125_000
"""A link that is slower than a megabit per second counts as broken."""
_MOST_PEERS = 4096


def overdue_at(since: float, grace_s: float, received: int) -> float:
    """When bytes are overdue that a server waits for: after a grace period, and as long as the bytes that came may take on the slowest
    link. A peer that sends single bytes does not put it off."""
    return since + grace_s + received / SLOWEST_BYTES_PER_S


class Rate(NamedTuple):
    """Messages a peer may send per second, and how many at once after a pause."""

    per_second: float = 2000.0
    burst: float = 4000.0


class RateLimit:
    """Keeps a bucket for each of the most recent peers. Any other starts with a full bucket, like a peer that has been quiet."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    @property
    def why(self) -> str:
        return f"more than {self.rate.per_second:g} messages per second"

    def admits(self, peer: bytes, now: float, cost: float = 1.0) -> bool:
        """`cost`: how many messages this one counts for. A bucket may be overdrawn once."""
        permits, since = self._buckets.pop(peer, (self.rate.burst, now))
        permits = min(self.rate.burst, permits + (now - since) * self.rate.per_second)
        admitted = permits >= 1.0
        self._buckets[peer] = (permits - cost if admitted else permits, now)
        if len(self._buckets) > _MOST_PEERS:
            self._buckets.popitem(last=False)
        return admitted
