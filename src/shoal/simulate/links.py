"""Links and processors in virtual time: when bytes arrive, and when a computation is done."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from shoal.simulate.event_queue import EventQueue
from shoal.simulate.machines import always_lit
from shoal.transports.netem.profiles import LinkProfile
from shoal.transports.netem.streams import PACKET_BYTES, LinkDirection


class Link:
    """A worker's link to the coordinator, as the proxy of `--netem` has it: bytes come late, never out of order. A lost packet is a stall,
    and now and then the end of the connection."""

    def __init__(self, profile: LinkProfile, dice: random.Random, dark: Callable[[float], float]) -> None:
        """`dark(moment)`: the moment itself, or the end of the time in which the worker's whole site is cut off."""
        self.profile, self._dice, self._dark = profile, dice, dark
        self._steady_s = None if dark is not always_lit or profile.loss or profile.outage_every_s else profile.round_trip_ms / 2000
        """What a few bytes take where nothing can happen to them on the way; None: something can."""
        self._lanes = (LinkDirection(profile), LinkDirection(profile))
        self._earliest = [0.0, 0.0]

    def arrival(self, size: float, now: float, down: bool) -> float | None:
        """When a message of so many bytes arrives; None: the connection breaks on the way."""
        profile, dice = self.profile, self._dice
        if self._steady_s is not None and not profile.jitter_ms:
            return self._lanes[down].carry(int(size), now) + self._steady_s
        stalls = self._losses(size)
        if stalls and dice.random() < 1 - (1 - profile.reset_chance) ** stalls:
            return None
        sent = self._lanes[down].carry(int(size), now) + stalls * profile.stall_s
        due = self._dark(profile.after_outage(sent + max(0.0, self._delay_s(size))))
        self._earliest[down] = max(self._earliest[down], due)
        return self._earliest[down]

    def _delay_s(self, size: float) -> float:
        """What the last byte takes after it was sent. The proxy lets each piece that it reads jitter by itself, and a piece that is early
        waits for those before it: so the more pieces follow each other closely, the later the last byte is."""
        profile, dice, piece = self.profile, self._dice, self._lanes[0].read_bytes
        half_s, spread_s, apart_s = profile.round_trip_ms / 2000, profile.jitter_ms / 2000, piece / profile.bytes_per_s
        if not spread_s:
            return half_s
        pieces = min(math.ceil(size / piece), 1 + int(2 * spread_s / apart_s))
        return half_s + max(dice.uniform(-spread_s, spread_s) - number * apart_s for number in range(pieces))

    def sign_of_life(self, now: float) -> float:
        """When a few bytes arrive that go over a connection of their own."""
        if self._steady_s is not None:
            return now + self._steady_s
        profile = self.profile
        stall_s = profile.stall_s if self._dice.random() < profile.loss else 0.0
        return self._dark(profile.after_outage(now + profile.round_trip_ms / 2000 + stall_s))

    def _losses(self, size: float) -> int:
        """Packets that are lost of a message: Poisson, as rare losses are."""
        mean = self.profile.loss * math.ceil(size / PACKET_BYTES)
        if mean <= 0:
            return 0
        if mean > 30:
            return max(0, round(self._dice.gauss(mean, math.sqrt(mean))))
        limit, count, product = math.exp(-mean), 0, self._dice.random()
        while product > limit:
            count, product = count + 1, product * self._dice.random()
        return count


class Cores:
    """Processors that several workers share: while more compute than there are cores, each gets its part of them."""

    def __init__(self, timeline: EventQueue, count: float, others: float = 0.0) -> None:
        """`others`: processes of other people that compute here all the time."""
        self._timeline, self._count, self._others = timeline, count, others
        self._left: dict[int, tuple[float, Callable[[], None]]] = {}
        """By number: seconds that a computation still takes on a core of its own, and what happens when it is done."""
        self._numbers, self._since, self._plan = 0, 0.0, 0

    def compute(self, work_s: float, done: Callable[[], None]) -> None:
        self._pass()
        self._numbers += 1
        self._left[self._numbers] = (work_s, done)
        self._plan_next()

    def _share(self) -> float:
        return min(1.0, self._count / max(1.0, len(self._left) + self._others))

    def _pass(self) -> None:
        """Take off what was computed since the last time."""
        passed_s, self._since = (self._timeline.now - self._since) * self._share(), self._timeline.now
        self._left = {number: (left_s - passed_s, done) for number, (left_s, done) in self._left.items()}

    def _plan_next(self) -> None:
        self._plan += 1
        if self._left:
            least = min(left_s for left_s, _ in self._left.values())
            self._timeline.after(max(0.0, least) / self._share(), self._finish, self._plan)

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return  # others came or went meanwhile, so this came too early or too late
        self._pass()
        number = min(self._left, key=lambda one: self._left[one][0])
        _, done = self._left.pop(number)
        self._plan_next()
        done()
