"""Bad networks on demand: a proxy between a worker and its coordinator that delays, caps, stalls and falls silent.

It works on TCP streams, without any privilege, so what it does is what an application sees of a bad link: bytes come late, never out of
order. A lost packet is a stall of one retransmission time-out, a few of them end in a reset, an outage is silence. The dice are seeded: the same
sequence of packets meets the same fate.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from shoal.errors import ShoalError
from shoal.transports import addresses
from shoal.transports.bell import Bell

if TYPE_CHECKING:
    from _typeshed import HasFileno

PACKET_BYTES = 1500
SMALLEST_TIMEOUT_S = 0.2
LARGEST_READ = 64 << 10
AHEAD_S = 0.1
"""How much of the link's time may be filled with bytes that wait for it, as in the queue of a router."""


Ready: TypeAlias = "dict[int | HasFileno, int]"


class Profile(NamedTuple):
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
    "good": Profile(20, 5, 0.001, 100),
    "cellular": Profile(80, 40, 0.02, 10),
    "satellite": Profile(400, 100, 0.01, 5),
    "degraded": Profile(200, 80, 0.1, 2),
    "brownout": Profile(80, 40, 0.05, 5, outage_s=2, outage_every_s=7),
}


_AT_ONCE = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
"""SO_LINGER that makes closing a reset."""


def profile(name: str) -> Profile:
    """The weather of this name."""
    if name not in PROFILES:
        raise ShoalError(f"`{name}` is no weather we know: {', '.join(PROFILES)}")
    return PROFILES[name]


class _Lane:
    """One direction of the link, shared by all its connections: when its capacity is free again."""

    def __init__(self, profile: Profile) -> None:
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


class _Stream:
    """One direction of one connection: bytes that are under way, and when they arrive."""

    def __init__(self, source: socket.socket, sink: socket.socket, lane: _Lane, dice: random.Random) -> None:
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


class _Connection:
    """A worker's connection and the one made for it to the target."""

    def __init__(self, near: socket.socket, target: addresses.Address, lanes: tuple[_Lane, _Lane], dice: random.Random, now: float) -> None:
        family, kind, protocol, _, place = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)[0]
        self.near, self.far = near, socket.socket(family, kind, protocol)
        for end in (near, self.far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._place = place
        self.connected = False
        self.connecting = False
        self.opens_at = lanes[0].profile.after_outage(now + lanes[0].profile.round_trip_ms / 1000)
        self.streams = (
            _Stream(near, self.far, lanes[0], random.Random(dice.random())),
            _Stream(self.far, near, lanes[1], random.Random(dice.random())),
        )

    def open(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.far.connect(self._place)
        self.connecting = True

    def opened(self) -> None:
        if self.far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise ConnectionRefusedError
        self.connected = True

    def interests(self, now: float) -> Iterator[tuple[socket.socket, int]]:
        """What each end should be watched for."""
        if not self.connected:
            yield self.near, 0
            yield self.far, selectors.EVENT_WRITE if self.connecting else 0
            return
        up, down = self.streams
        for end, reading, writing in ((self.near, up, down), (self.far, down, up)):
            wanted = selectors.EVENT_READ if reading.has_room(now) else 0
            yield end, wanted | (selectors.EVENT_WRITE if writing.blocked else 0)

    def wakes_at(self, now: float) -> float:
        if not self.connected:
            return math.inf if self.connecting else self.opens_at
        room = min((stream.lane.free_at - AHEAD_S for stream in self.streams if not stream.has_room(now)), default=math.inf)
        return min(*(stream.due() for stream in self.streams), room if room > now else math.inf)

    def close(self, *, reset: bool) -> None:
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                end.close()


class Proxy:
    """Connect to its `address` in place of the target's, and have the weather of the profile."""

    def __init__(self, target_address: str, profile: Profile, seed: int = 0) -> None:
        self._target = addresses.parse(target_address)
        self._lanes = (_Lane(profile), _Lane(profile))
        self._dice = random.Random(seed)
        self._connections: list[_Connection] = []
        self._bell = Bell()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * LARGEST_READ)
        self._listener.setblocking(False)
        self.address = str(addresses.Address(self._target.scheme, "127.0.0.1", self._listener.getsockname()[1]))
        self._began = time.monotonic()
        self._silent = self._resetting = self._closing = False
        self._thread = threading.Thread(target=self._run, name="shoal-weather", daemon=True)
        self._thread.start()

    # --- from any thread ---------------------------------------------------------------------------

    def cut(self) -> None:
        """Silence: nothing is lost and nothing arrives, until `heal()`."""
        self._silent = True
        self._bell.ring()

    def heal(self) -> None:
        self._silent = False
        self._bell.ring()

    def reset_all(self) -> None:
        """Break every connection there is."""
        self._resetting = True
        self._bell.ring()

    def close(self) -> None:
        self._closing = True
        self._bell.ring()
        self._thread.join()

    # --- in its own thread -------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _run(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing:
                self._turn()
        self._end(self._connections)
        self._listener.close()
        self._bell.close()

    def _turn(self) -> None:
        """Wait until something can be done, and do it."""
        now = self._now()
        wakes_at = math.inf
        for connection in self._connections:
            self._watch(connection, now)
            wakes_at = min(wakes_at, connection.wakes_at(now))
        timeout = None if self._silent or wakes_at == math.inf else max(0.0, wakes_at - now)
        ready = {key.fileobj: events for key, events in self._selector.select(timeout)}
        self._bell.silence()
        if self._resetting:
            self._resetting = False
            self._end(self._connections)
        if self._listener in ready:
            self._accept()
        if not self._silent:
            self._end([connection for connection in self._connections if self._finished(connection, ready)])

    def _watch(self, connection: _Connection, now: float) -> None:
        for end, events in connection.interests(now):
            known = self._selector.get_map().get(end)
            events = 0 if self._silent else events
            if events and not known:
                self._selector.register(end, events)
            elif events and known and known.events != events:
                self._selector.modify(end, events)
            elif known and not events:
                self._selector.unregister(end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listener.accept()
            self._connections.append(_Connection(near, self._target, self._lanes, self._dice, self._now()))

    def _finished(self, connection: _Connection, ready: Ready) -> bool:
        """Do what this connection is ready for; whether it has come to its end."""
        try:
            if connection.connected:
                return self._exchange(connection, ready)
            if connection.connecting:
                if connection.far in ready:
                    connection.opened()
            elif self._now() >= connection.opens_at:
                connection.open()
        except OSError:
            return True
        return False

    def _exchange(self, connection: _Connection, ready: Ready) -> bool:
        for stream in connection.streams:
            if ready.get(stream.source, 0) & selectors.EVENT_READ:
                stream.read(self._now())
            stream.deliver(self._now())
        return all(stream.delivered_end for stream in connection.streams)

    def _end(self, connections: list[_Connection]) -> None:
        for connection in list(connections):
            for end in (connection.near, connection.far):
                with contextlib.suppress(KeyError, ValueError):
                    if not self._closing:
                        self._selector.unregister(end)
            connection.close(reset=not all(stream.delivered_end for stream in connection.streams))
            self._connections.remove(connection)
