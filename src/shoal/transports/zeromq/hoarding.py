"""Peers that send a message without end.

ZeroMQ limits a frame, but not how many of them make a message, and it keeps all of an unfinished one in memory where nobody sees it. So
we ask the system how many bytes a connection has brought since it last finished a message, and end it when that is more than any message
may be. Only Linux counts these (`tcp_info.tcpi_bytes_received`); elsewhere this does nothing.
"""

from __future__ import annotations

import socket
import struct
import sys

import zmq

from shoal.transports.zeromq.crowding import borrowed

LOOK_EVERY_S = 0.2
_BYTES_RECEIVED = struct.Struct("=128xQ")


class Hoarding:
    """`heard` is for the thread that receives; all else for the gatekeeper's. A file descriptor names a connection while it lasts."""

    def __init__(self, allowed_bytes: int) -> None:
        self.allowed_bytes = allowed_bytes
        self._finished_at: dict[int, int] = {}
        self._heard: set[int] = set()

    def __len__(self) -> int:
        return len(self._finished_at)

    def accepted(self, descriptor: int) -> None:
        if sys.platform == "linux":
            self._finished_at[descriptor] = 0

    def ended(self, descriptor: int) -> None:
        self._finished_at.pop(descriptor, None)

    def heard(self, part: zmq.Frame) -> None:
        """A message is finished, so nothing that came before on its connection is hoarded."""
        if self._finished_at:
            self._heard.add(part.get(zmq.SRCFD))

    def end_them(self) -> int:
        """Hang up on connections that hoard; how many there were."""
        return sum(self._hoards(descriptor) for descriptor in list(self._finished_at))

    def _hoards(self, descriptor: int) -> bool:
        finished = descriptor in self._heard
        self._heard.discard(descriptor)
        try:
            with borrowed(descriptor) as line:
                received = bytes_received(line)
                if finished:
                    self._finished_at[descriptor] = received
                elif received - self._finished_at[descriptor] > self.allowed_bytes:
                    line.shutdown(socket.SHUT_RDWR)
                    self.ended(descriptor)
                    return True
        except OSError:  # it ended meanwhile
            self.ended(descriptor)
        return False


def bytes_received(line: socket.socket) -> int:
    if sys.platform != "linux":
        return 0
    info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    return int(_BYTES_RECEIVED.unpack(info)[0]) if len(info) == _BYTES_RECEIVED.size else 0
