"""Bytes under way: when they leave, what happens to them, and when they arrive."""

from __future__ import annotations

import math
import random
import socket
from collections import deque

from shoal.transports.netem.profiles import LinkProfile

PACKET_BYTES = 1500
LARGEST_READ = 64 << 10
AHEAD_S = 0.1
"""How much of the link's time may be filled with bytes that wait for it, as in the queue of a router."""


class LinkDirection:
    """One direction of the link, shared by all its connections: when its capacity is free again."""

    def __init__(self, profile: LinkProfile) -> None:
        self.profile = profile
        self.free_at = 0.0

    def carry(self, size: int, now: float) -> float:
        """When the last of these bytes has been put on the line."""
        self.free_at = max(now, self.free_at) + size / self.profile.bytes_per_s
        return self.free_at

    @property
    def read_bytes(self) -> int:
        """Small enough for a slow link to be smooth."""
        return int(min(LARGEST_READ, max(PACKET_BYTES, self.profile.bytes_per_s * 0.02)))


class DelayedStream:
    """One direction of one connection: bytes that are under way, and when they arrive."""

    def __init__(self, source: socket.socket, sink: socket.socket, lane: LinkDirection, dice: random.Random) -> None:
        self.source, self.sink, self.lane = source, sink, lane
        self.ended = self.delivered_end = self.blocked = False
        self._dice = dice
        self._under_way: deque[tuple[float, memoryview]] = deque()
        self._waiting = 0
        self._held_until = 0.0
        self._until_loss = self._next_loss()

    def _next_loss(self) -> float:
        """Packets that get through before one that does not."""
        loss = self.lane.profile.loss
        return math.floor(math.log(1.0 - self._dice.random()) / math.log(1.0 - loss)) if 0.0 < loss < 1.0 else math.inf

    def has_room(self, now: float) -> bool:
        profile = self.lane.profile
        in_flight = profile.bytes_per_s * (profile.round_trip_ms + profile.jitter_ms + 2000 * AHEAD_S) / 1000
        return not self.ended and self.lane.free_at < now + AHEAD_S and self._waiting < in_flight + self.lane.read_bytes

    def read(self, now: float) -> None:
        """Take what the source has; ConnectionError where a lost packet takes the connection with it."""
        data = self.source.recv(self.lane.read_bytes)
        self.ended = not data
        profile = self.lane.profile
        self._held_until = max(self._held_until, self.lane.carry(len(data), now)) + self._stalls(len(data))
        delay = (profile.round_trip_ms / 2 + self._dice.uniform(-profile.jitter_ms, profile.jitter_ms) / 2) / 1000
        due = profile.after_outage(self._held_until + max(0.0, delay))
        earliest = self._under_way[-1][0] if self._under_way else 0.0
        self._under_way.append((max(due, earliest), memoryview(data)))
        self._waiting += len(data)

    def _stalls(self, size: int) -> float:
        self._until_loss -= math.ceil(size / PACKET_BYTES)
        stalled = 0.0
        while self._until_loss < 0:
            self._until_loss += 1 + self._next_loss()
            stalled += self.lane.profile.stall_s
            if self._dice.random() < self.lane.profile.reset_chance:
                raise ConnectionResetError
        return stalled

    def due(self) -> float:
        """When there is something to deliver; while the sink takes nothing, that is not a matter of time."""
        return math.inf if self.blocked or not self._under_way else self._under_way[0][0]

    def deliver(self, now: float) -> None:
        self.blocked = False
        while self._under_way and self._under_way[0][0] <= now:
            due, data = self._under_way.popleft()
            if not data:
                self.delivered_end = True
                self.sink.shutdown(socket.SHUT_WR)
                return
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                sent = 0
            self._waiting -= sent
            if sent < len(data):
                self._under_way.appendleft((due, data[sent:]))
                self.blocked = True
                return
