"""Peers that send a message without end, and strangers that send anything.

ZeroMQ limits a frame, but not how many of them make a message, and it keeps all of an unfinished one in memory where nobody sees it. So
we ask the system how many bytes a connection has brought since it last finished a message, and end it when that is more than any message
may be. A stranger, whose handshake has not succeeded, needs a few hundred bytes for it, and is ended when it has brought some thousands.
ZeroMQ does not tell whose handshake succeeded; but who is let in is sent more than a stranger ever is.
Only Linux counts these bytes (`tcp_info`); elsewhere none are limited, and who has sent a message is no stranger any more.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

import zmq

from shoal.transports.zeromq.connection_limits import borrowed, hang_up

LOOK_EVERY_S = 0.2
LOOK_AT_STRANGERS_EVERY_S = 0.02
"""In between they can bring what the network carries in that time, of which ZeroMQ takes in one piece for each connection."""
STRANGERS_BYTES = 16 << 10
TOLD_TO_STRANGERS = {b"PLAIN": 64 + 10 + 12, b"CURVE": 64 + 170 + 12}
"""What ZeroMQ sends to one that it does not let in: its greeting, WELCOME and ERROR. READY, for the others, is longer: 43 and 67 bytes."""
_COUNTS = struct.Struct("=120xQQ")


class Hoarding:
    """`heard` is for the thread that receives; all else for the gatekeeper's. A file descriptor names a connection while it lasts."""

    def __init__(self, allowed_bytes: int, mechanism: bytes) -> None:
        self.allowed_bytes = allowed_bytes
        self.strangers: dict[int, None] = {}
        """Connections that are not known to be let in, in the order of their coming."""
        self._told_to_strangers = TOLD_TO_STRANGERS[mechanism]
        self._finished_at: dict[int, int] = {}
        self._heard: set[int] = set()

    def __len__(self) -> int:
        return len(self._finished_at)

    def accepted(self, descriptor: int) -> None:
        self.ended(descriptor)
        self._finished_at[descriptor] = 0
        self.strangers[descriptor] = None

    def ended(self, descriptor: int) -> None:
        self._finished_at.pop(descriptor, None)
        self.strangers.pop(descriptor, None)

    def heard(self, part: zmq.Frame) -> None:
        """A message is finished, so nothing that came before on its connection is hoarded."""
        if self._finished_at:
            self._heard.add(part.get(zmq.SRCFD))

    def end_them(self, *, only_strangers: bool = False) -> int:
        """Hang up on connections that hoard; how many there were."""
        return sum(self._hoards(descriptor) for descriptor in list(self.strangers if only_strangers else self._finished_at))

    def first_stranger(self, is_meant: Callable[[int], bool]) -> int | None:
        """Of the connections that are meant, the first to come that is not let in yet."""
        for descriptor in filter(is_meant, list(self.strangers)):
            self._hoards(descriptor)  # it may have been let in a moment ago
            if descriptor in self.strangers:
                return descriptor
        return None

    def _hoards(self, descriptor: int) -> bool:
        finished = descriptor in self._heard
        self._heard.discard(descriptor)
        try:
            with borrowed(descriptor) as line:
                counts = counts_of(line)
        except OSError:  # it ended meanwhile
            self.ended(descriptor)
            return False
        if finished or counts.told > self._told_to_strangers:
            self.strangers.pop(descriptor, None)
        if finished:
            self._finished_at[descriptor] = counts.received
        elif counts.received - self._finished_at[descriptor] > (STRANGERS_BYTES if descriptor in self.strangers else self.allowed_bytes):
            hang_up(descriptor)
            self.ended(descriptor)
            return True
        return False


class Counts(NamedTuple):
    """Bytes of a connection."""

    told: int
    """Sent to the other side, which has confirmed them."""
    received: int


def counts_of(line: socket.socket) -> Counts:
    if sys.platform != "linux":
        return Counts(0, 0)
    info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
    return Counts(*_COUNTS.unpack(info)) if len(info) == _COUNTS.size else Counts(0, 0)
