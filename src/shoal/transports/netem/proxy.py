"""A thread that forwards connections with the delays and losses of a link."""

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
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from shoal.transports import addresses
from shoal.transports.netem.profiles import LinkProfile
from shoal.transports.netem.streams import AHEAD_S, LARGEST_READ, DelayedStream, LinkDirection
from shoal.transports.wakeup import Wakeup

if TYPE_CHECKING:
    from _typeshed import HasFileno

Ready: TypeAlias = "dict[int | HasFileno, int]"
_AT_ONCE = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
"""SO_LINGER that makes closing a reset."""


class ProxiedConnection:
    """A worker's connection and the one made for it to the target."""

    def __init__(
        self, near: socket.socket, target: addresses.Address, lanes: tuple[LinkDirection, LinkDirection], dice: random.Random, now: float
    ) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)[0]
        self.near, self.far = near, socket.socket(family, kind, protocol)
        for end in (near, self.far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._target_address = address
        self.connected = False
        self.connecting = False
        self.opens_at = lanes[0].profile.after_outage(now + lanes[0].profile.round_trip_ms / 1000)
        self.streams = (
            DelayedStream(near, self.far, lanes[0], random.Random(dice.random())),
            DelayedStream(self.far, near, lanes[1], random.Random(dice.random())),
        )

    def open(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.far.connect(self._target_address)
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
        reads_at = min((stream.lane.free_at - AHEAD_S for stream in self.streams if not stream.has_room(now)), default=math.inf)
        return min(*(stream.due() for stream in self.streams), reads_at if reads_at > now else math.inf)

    def close(self, *, reset: bool) -> None:
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                end.close()


class NetemProxy:
    """Listens at `address`, and forwards to the target over a link with this profile."""

    def __init__(self, target_address: str, profile: LinkProfile, seed: int = 0) -> None:
        self._target = addresses.parse(target_address)
        self._lanes = (LinkDirection(profile), LinkDirection(profile))
        self._dice = random.Random(seed)
        self._connections: list[ProxiedConnection] = []
        self._wakeup = Wakeup()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * LARGEST_READ)
        self._listener.setblocking(False)
        self.address = str(addresses.Address(self._target.scheme, "127.0.0.1", self._listener.getsockname()[1]))
        self._began = time.monotonic()
        self._silent = self._resetting = self._closing = False
        self._thread = threading.Thread(target=self._run, name="shoal-netem", daemon=True)
        self._thread.start()

    # --- from any thread ---------------------------------------------------------------------------

    def cut(self) -> None:
        """Let nothing through until `heal()`; nothing is lost meanwhile."""
        self._silent = True
        self._wakeup.wake()

    def heal(self) -> None:
        self._silent = False
        self._wakeup.wake()

    def reset_all(self) -> None:
        """Break every connection there is."""
        self._resetting = True
        self._wakeup.wake()

    def close(self) -> None:
        self._closing = True
        self._wakeup.wake()
        self._thread.join()

    # --- in its own thread -------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _run(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing:
                self._turn()
        self._end(self._connections)
        self._listener.close()
        self._wakeup.close()

    def _turn(self) -> None:
        """Wait until something can be done, and do it."""
        now = self._now()
        wakes_at = math.inf
        for connection in self._connections:
            self._watch(connection, now)
            wakes_at = min(wakes_at, connection.wakes_at(now))
        timeout = None if self._silent or wakes_at == math.inf else max(0.0, wakes_at - now)
        ready = {key.fileobj: events for key, events in self._selector.select(timeout)}
        self._wakeup.clear()
        if self._resetting:
            self._resetting = False
            self._end(self._connections)
        if self._listener in ready:
            self._accept()
        if not self._silent:
            self._end([connection for connection in self._connections if self._finished(connection, ready)])

    def _watch(self, connection: ProxiedConnection, now: float) -> None:
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
            self._connections.append(ProxiedConnection(near, self._target, self._lanes, self._dice, self._now()))

    def _finished(self, connection: ProxiedConnection, ready: Ready) -> bool:
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

    def _exchange(self, connection: ProxiedConnection, ready: Ready) -> bool:
        for stream in connection.streams:
            if ready.get(stream.source, 0) & selectors.EVENT_READ:
                stream.read(self._now())
            stream.deliver(self._now())
        return all(stream.delivered_end for stream in connection.streams)

    def _end(self, connections: list[ProxiedConnection]) -> None:
        for connection in list(connections):
            for end in (connection.near, connection.far):
                with contextlib.suppress(KeyError, ValueError):
                    if not self._closing:
                        self._selector.unregister(end)
            connection.close(reset=not all(stream.delivered_end for stream in connection.streams))
            self._connections.remove(connection)
