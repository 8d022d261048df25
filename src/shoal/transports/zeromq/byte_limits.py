"""Limits on the bytes that a connection may send before it finishes a message, or before it has authenticated.

ZeroMQ limits the size of a frame, but not the number of frames in a message, and buffers all of an unfinished message. So this module asks
the system how many bytes a connection has sent since its last finished message, and ends it when that is more than any message may have.
A handshake needs a few hundred bytes, so a connection that has not authenticated is ended after some thousands. ZeroMQ does not report
whose handshake succeeded, but it sends more bytes to a client that it accepts than to one that it refuses.
Only Linux counts these bytes (`tcp_info`). Elsewhere none are limited, and a connection counts as authenticated after its first message.
"""

from __future__ import annotations

import socket
import struct
import sys

import zmq

from shoal.transports.zeromq.sockets import borrow_socket, shut_down

CHECK_EVERY_S = 0.2
CHECK_UNAUTHENTICATED_EVERY_S = 0.02
"""Between two checks they can send what the network carries in that time, of which ZeroMQ buffers one piece for each connection."""
UNAUTHENTICATED_BYTES = 16 << 10
SENT_TO_REFUSED = {b"PLAIN": 64 + 10 + 12, b"CURVE": 64 + 170 + 12}
"""What ZeroMQ sends to a client that it refuses: its greeting, WELCOME and ERROR. READY, for the others, is longer: 43 and 67 bytes."""
_COUNTS = struct.Struct("=120xQQ")


class ByteLimiter:
    """Counts bytes per connection, which its descriptor names while it lasts. `on_message` belongs to the thread that receives, all else
    to the authenticator's."""

    def __init__(self, allowed_bytes: int, mechanism: bytes) -> None:
        self.allowed_bytes = allowed_bytes
        self.unauthenticated: dict[int, None] = {}
        """Connections that are not known to have authenticated."""
        self._sent_to_refused = SENT_TO_REFUSED[mechanism]
        self._finished_at: dict[int, int] = {}
        """Bytes that a connection had sent when its last message was finished."""
        self._finished: set[int] = set()
        """Connections that finished a message since the last check."""

    def __len__(self) -> int:
        return len(self._finished_at)

    def on_accepted(self, descriptor: int) -> None:
        self.on_ended(descriptor)
        self._finished_at[descriptor] = 0
        self.unauthenticated[descriptor] = None

    def on_ended(self, descriptor: int) -> None:
        self._finished_at.pop(descriptor, None)
        self.unauthenticated.pop(descriptor, None)

    def on_message(self, part: zmq.Frame) -> None:
        """A message is finished, so its bytes no longer count."""
        if self._finished_at:
            self._finished.add(part.get(zmq.SRCFD))

    def end_over_limit(self, *, only_unauthenticated: bool = False) -> int:
        """End the connections that are over their limit; returns how many there were."""
        return sum(self._check(descriptor) for descriptor in list(self.unauthenticated if only_unauthenticated else self._finished_at))

    def has_authenticated(self, descriptor: int) -> bool:
        """Whether a connection has authenticated by now, or has ended."""
        if descriptor in self.unauthenticated:
            self._check(descriptor)
        return descriptor not in self.unauthenticated

    def _check(self, descriptor: int) -> bool:
        """End a connection if it is over its limit; returns whether it was."""
        finished = descriptor in self._finished
        self._finished.discard(descriptor)
        try:
            with borrow_socket(descriptor) as connection:
                sent, received = _byte_counts(connection)
        except OSError:  # it ended meanwhile
            self.on_ended(descriptor)
            return False
        if finished or sent > self._sent_to_refused:
            self.unauthenticated.pop(descriptor, None)
        most = UNAUTHENTICATED_BYTES if descriptor in self.unauthenticated else self.allowed_bytes
        if finished:
            self._finished_at[descriptor] = received
        elif received - self._finished_at[descriptor] > most:
            shut_down(descriptor)
            self.on_ended(descriptor)
            return True
        return False


def _byte_counts(connection: socket.socket) -> tuple[int, int]:
    """The bytes of a connection that the other side has confirmed, and the bytes that were received."""
    if sys.platform != "linux":
        return 0, 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
    sent, received = _COUNTS.unpack(info) if len(info) == _COUNTS.size else (0, 0)
    return sent, received
