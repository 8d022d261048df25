"""Links and CPU cores in virtual time: when bytes arrive, and when a computation is done."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from shoal.simulate.event_queue import EventQueue
from shoal.simulate.machines import no_outage
from shoal.transports.netem.profiles import LinkProfile
from shoal.transports.netem.streams import PACKET_BYTES, LinkDirection


class Link:
    """A worker's link to the coordinator, as the `--netem` proxy models it: no reordering; a lost packet stalls or resets a connection."""

    def __init__(self, profile: LinkProfile, rng: random.Random, after_outage: Callable[[float], float]) -> None:
        """`after_outage(moment)`: the moment itself, or the end of the outage of the worker's site at that moment."""
        self.profile, self._rng, self._after_outage = profile, rng, after_outage
        reliable = after_outage is no_outage and not profile.loss and not profile.outage_every_s
        self._constant_s = profile.round_trip_ms / 2000 if reliable else None
        """Delay of a small message on a link without loss and outages; None: the link has them."""
        self._directions = (LinkDirection(profile), LinkDirection(profile))
        self._earliest = [0.0, 0.0]

    def arrival(self, size: float, now: float, down: bool) -> float | None:
        """When a message of `size` bytes arrives; None: the connection is reset on the way. `down`: from the coordinator to the worker."""
        profile = self.profile
        if self._constant_s is not None and not profile.jitter_ms:
            return self._directions[down].carry(int(size), now) + self._constant_s
        stalls = self._losses(size)
        if stalls and self._rng.random() < 1 - (1 - profile.reset_chance) ** stalls:
            return None
        sent = self._directions[down].carry(int(size), now) + stalls * profile.stall_s
        due = self._after_outage(profile.after_outage(sent + max(0.0, self._delay_s(size))))
        self._earliest[down] = max(self._earliest[down], due)
        return self._earliest[down]

    def _delay_s(self, size: float) -> float:
        """Delay of a message's last byte. The proxy draws a jitter for each chunk that it reads, and an early chunk waits for those before
        it: so the more chunks follow each other closely, the later the last byte is."""
        profile, chunk = self.profile, self._directions[0].read_bytes
        half_s, spread_s, interval_s = profile.round_trip_ms / 2000, profile.jitter_ms / 2000, chunk / profile.bytes_per_s
        if not spread_s:
            return half_s
        chunks = min(math.ceil(size / chunk), 1 + int(2 * spread_s / interval_s))
        return half_s + max(self._rng.uniform(-spread_s, spread_s) - number * interval_s for number in range(chunks))

    def heartbeat_arrival(self, now: float) -> float:
        """When a heartbeat arrives. It has a connection of its own, so it does not wait for other messages."""
        if self._constant_s is not None:
            return now + self._constant_s
        profile = self.profile
        stall_s = profile.stall_s if self._rng.random() < profile.loss else 0.0
        return self._after_outage(profile.after_outage(now + profile.round_trip_ms / 2000 + stall_s))

    def _losses(self, size: float) -> int:
        """Number of lost packets of a message: Poisson, or its normal approximation for a mean over 30."""
        mean = self.profile.loss * math.ceil(size / PACKET_BYTES)
        if mean <= 0:
            return 0
        if mean > 30:
            return max(0, round(self._rng.gauss(mean, math.sqrt(mean))))
        limit, count, product = math.exp(-mean), 0, self._rng.random()
        while product > limit:
            count, product = count + 1, product * self._rng.random()
        return count


class Cores:
    """CPU cores that several workers share: processor sharing, with equal shares and at most one core for each computation."""

    def __init__(self, timeline: EventQueue, count: float, others: float = 0.0) -> None:
        """`others`: unrelated processes that always compute on these cores."""
        self._timeline, self._count, self._others = timeline, count, others
        self._left: dict[int, tuple[float, Callable[[], None]]] = {}
        """By number: remaining seconds of a computation on a core of its own, and the callback for its end."""
        self._started, self._since, self._scheduled = 0, 0.0, 0

    def compute(self, work_s: float, done: Callable[[], None]) -> None:
        self._advance()
        self._started += 1
        self._left[self._started] = (work_s, done)
        self._schedule_next()

    def _share(self) -> float:
        return min(1.0, self._count / max(1.0, len(self._left) + self._others))

    def _advance(self) -> None:
        """Subtract the work that was done since the last call."""
        passed_s, self._since = (self._timeline.now - self._since) * self._share(), self._timeline.now
        self._left = {number: (left_s - passed_s, done) for number, (left_s, done) in self._left.items()}

    def _schedule_next(self) -> None:
        self._scheduled += 1
        if self._left:
            least = min(left_s for left_s, _ in self._left.values())
            self._timeline.after(max(0.0, least) / self._share(), self._finish, self._scheduled)

    def _finish(self, scheduled: int) -> None:
        if scheduled != self._scheduled:
            return  # the number of computations has changed since, so this time is wrong
        self._advance()
        number = min(self._left, key=lambda one: self._left[one][0])
        _, done = self._left.pop(number)
        self._schedule_next()
        done()
