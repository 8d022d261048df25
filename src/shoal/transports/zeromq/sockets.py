"""What both sides' sockets have in common: limits, signs of life, and frames that are not copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import zmq

from shoal.transports.interface import Frame
from shoal.transports.rate import SLOWEST_BYTES_PER_S
from shoal.transports.wire import Limits

Socket: TypeAlias = "zmq.Socket[bytes]"

USER = b"shoal"
"""PLAIN wants a name beside the token."""
ZERO_COPY_BYTES = 1 << 20
"""Below this, handing over a reference costs more than copying."""
QUEUED = 4
"""Messages waiting per connection and direction: a client has one call in flight, and perhaps a few it gave up."""
SLACK_BYTES = 64 << 10
"""A frame slightly too large is still taken in, and refused by name; beyond that ZeroMQ hangs up."""
LEAST_PATIENCE_S = 30.0


def most_patience_s(frame_bytes: int) -> float:
    """How long a living peer may be silent: heartbeats queue behind the frame in flight, and that may be large and the link slow."""
    return max(LEAST_PATIENCE_S, 2 * frame_bytes / SLOWEST_BYTES_PER_S)


def tune(socket: Socket, limits: Limits, hosts: Sequence[str]) -> None:
    """Bounded queues, and dead connections noticed: by TCP while idle, by heartbeats in any case."""
    socket.maxmsgsize = max(limits.frame_bytes, limits.header_bytes) + SLACK_BYTES
    socket.rcvhwm = socket.sndhwm = QUEUED
    socket.heartbeat_ivl = 10_000
    socket.heartbeat_timeout = int(1000 * most_patience_s(limits.frame_bytes))
    socket.handshake_ivl = 15_000
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 15, 5, 3
    socket.ipv6 = any(":" in host for host in hosts)


def send(socket: Socket, parts: Sequence[Frame]) -> None:
    """Hand a message over without waiting; zmq.Again where there is no room."""
    try:
        _hand_over(socket, parts)
    except zmq.Again:
        socket.getsockopt(zmq.EVENTS)  # ZeroMQ learns only now and then what has left its queues: this makes it look
        _hand_over(socket, parts)


def _hand_over(socket: Socket, parts: Sequence[Frame]) -> None:
    last = len(parts) - 1
    for index, part in enumerate(parts):
        more = zmq.SNDMORE if index < last else 0
        socket.send(part, zmq.NOBLOCK | more, copy=len(part) < ZERO_COPY_BYTES)


def receive(socket: Socket, most: int) -> list[zmq.Frame]:
    """The message that waits, not copied. Of one with more parts than allowed, all but one of the excess are let go as they come."""
    parts: list[zmq.Frame] = []
    while True:
        part: zmq.Frame = socket.recv(zmq.NOBLOCK, copy=False)
        if len(parts) <= most:
            parts.append(part)
        if not part.more:
            return parts
