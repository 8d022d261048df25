"""Profiles of simulated network links: latency, loss and bandwidth."""

from __future__ import annotations

import re
from typing import NamedTuple

from shoal.errors import ShoalError

SMALLEST_TIMEOUT_S = 0.2
"""No TCP waits less before it sends a packet again."""


class LinkProfile(NamedTuple):
    """A link. Each direction has the whole rate and half the round trip."""

    round_trip_ms: float
    jitter_ms: float
    loss: float
    mbit_per_s: float
    outage_s: float = 0.0
    outage_every_s: float = 0.0
    reset_chance: float = 0.0002
    """Of each lost packet, that the connection dies of it."""

    @property
    def bytes_per_s(self) -> float:
        return self.mbit_per_s * 1e6 / 8

    @property
    def stall_s(self) -> float:
        return max(SMALLEST_TIMEOUT_S, 2 * self.round_trip_ms / 1000)

    def after_outage(self, moment: float) -> float:
        """The moment itself, or the end of the outage it falls into; time counts from when the link came up."""
        if not self.outage_every_s:
            return moment
        cycle, phase = divmod(moment, self.outage_every_s)
        return moment if phase < self.outage_every_s - self.outage_s else (cycle + 1) * self.outage_every_s


PROFILES = {
    "good": LinkProfile(20, 5, 0.001, 100),
    "cellular": LinkProfile(80, 40, 0.02, 10),
    "satellite": LinkProfile(400, 100, 0.01, 5),
    "degraded": LinkProfile(200, 80, 0.1, 2),
    "brownout": LinkProfile(80, 40, 0.05, 5, outage_s=2, outage_every_s=7),
}


def profile(name: str) -> LinkProfile:
    """The profile of this name, or a link without loss of a given rate in Mbit/s: `50mbit`."""
    if rate := re.fullmatch(r"(\d+(?:\.\d+)?)mbit", name):
        if float(rate[1]) <= 0:
            raise ShoalError("a link of 0mbit carries nothing")
        return LinkProfile(20, 0, 0.0, float(rate[1]))
    if name not in PROFILES:
        raise ShoalError(f"`{name}` is no known weather: {', '.join(PROFILES)}, or a rate such as 50mbit")
    return PROFILES[name]
