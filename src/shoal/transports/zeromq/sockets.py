"""Shared by the sockets of both sides: limits, heartbeats, and messages in pieces that are not copied on their way out."""

from __future__ import annotations

import contextlib
import socket as sockets
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import zmq

from shoal.transports.addresses import is_loopback
from shoal.transports.interface import Frame
from shoal.transports.request_rate import SLOWEST_BYTES_PER_S
from shoal.transports.wire import Limits, Malformed, Oversized, decode
from shoal.transports.zeromq.shared_frames import SHARED, SharedReader, place

Socket: TypeAlias = "zmq.Socket[bytes]"

USER = b"shoal"
"""PLAIN wants a name beside the token."""
ZERO_COPY_BYTES = 1 << 20
"""Below this, handing over a reference costs more than copying."""
QUEUED = 4
"""Messages waiting per connection and direction: a client has one call in flight, and perhaps a few it gave up."""
PIECE_BYTES = 1 << 20
"""The longest piece that travels, so the most that this process buffers of a peer without authentication. Longer parts are cut."""
NOT_SHARED = "not-shared"
"""Reason with which a server refuses a message whose frames lie in memory that it cannot read."""
SLACK_BYTES = 4 << 10
"""What encryption adds to a piece."""
_LONGEST_SIZES = 8 << 10
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
LEAST_PATIENCE_S = 30.0


def most_patience_s(frame_bytes: int) -> float:
    """How long a living peer may be silent: heartbeats queue behind the frame in flight, and that may be large and the link slow."""
    return max(LEAST_PATIENCE_S, 2 * frame_bytes / SLOWEST_BYTES_PER_S)


def tune(socket: Socket, limits: Limits, hosts: Sequence[str]) -> None:
    """Bounded queues, and dead connections noticed: by TCP while idle, by heartbeats in any case."""
    socket.maxmsgsize = PIECE_BYTES + SLACK_BYTES
    socket.rcvhwm = socket.sndhwm = QUEUED
    socket.heartbeat_ivl = 10_000
    socket.heartbeat_timeout = int(1000 * most_patience_s(limits.frame_bytes))
    socket.handshake_ivl = 15_000
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 15, 5, 3
    socket.ipv6 = any(":" in host for host in hosts)


@contextlib.contextmanager
def borrow_socket(descriptor: int) -> Iterator[sockets.socket]:
    """The TCP connection behind a descriptor, which stays ZeroMQ's. It takes no descriptor of its own: there may be none left. Raises
    OSError where the connection has ended and the descriptor belongs to something else by now."""
    connection = sockets.socket(fileno=descriptor)
    try:
        if connection.family not in (sockets.AF_INET, sockets.AF_INET6):
            raise OSError("not a connection over a network")
        yield connection
    finally:
        connection.detach()


def local_port(part: zmq.Frame) -> int | None:
    """The port of the process that sent a message, if its connection comes from this machine."""
    with contextlib.suppress(OSError, zmq.ZMQError, ValueError), borrow_socket(int(part.get(zmq.SRCFD))) as connection:
        host, port = connection.getpeername()[:2]
        return int(port) if is_loopback(host) else None
    return None


def port_of(descriptor: int) -> int | None:
    """This side's port of a connection to a server of this machine."""
    with contextlib.suppress(OSError), borrow_socket(descriptor) as connection:
        host, port = connection.getsockname()[:2]
        return int(port) if is_loopback(host) else None
    return None


def shut_down(descriptor: int) -> None:
    """End a connection of ZeroMQ's."""
    with contextlib.suppress(OSError), borrow_socket(descriptor) as connection:  # it may have ended meanwhile
        connection.shutdown(sockets.SHUT_RDWR)


class SharedRoom(NamedTuple):
    """Memory that the receiver of a message has mapped, too."""

    room: memoryview
    reference: bytes = b""
    """Its name, where the receiver has to know it."""


def in_pieces(parts: Sequence[Frame], shared: SharedRoom | None = None) -> list[Frame]:
    """A message as it travels: the sizes of its parts, and the parts, of which long ones are cut. ZeroMQ takes a frame of the largest size
    in before it knows who sends it, so that size must be small; and it is the same for all peers. `shared`: long parts are left there."""
    left = place(parts, shared.room) if shared is not None else None
    sizes = list(map(len, parts))
    if left is not None:
        sizes = [size | SHARED if there else size for size, there in zip(sizes, left, strict=True)]
    named = [shared.reference] if shared is not None and shared.reference else []
    if named:
        sizes[0] |= SHARED
    pieces: list[Frame] = [struct.pack(f">{len(parts)}Q", *sizes), *named]
    for index, part in enumerate(parts):
        if left is not None and left[index]:
            continue
        if len(part) <= PIECE_BYTES:
            pieces.append(part)
        else:
            view = memoryview(part)
            pieces += [view[start : start + PIECE_BYTES] for start in range(0, len(part), PIECE_BYTES)]
    return pieces


def send(socket: Socket, parts: Sequence[Frame], peer: bytes | None = None, shared: SharedRoom | None = None) -> None:
    """Queue a message without waiting; zmq.Again where the queue is full."""
    pieces = in_pieces(parts, shared) if peer is None else [peer, *in_pieces(parts, shared)]
    try:
        _hand_over(socket, pieces)
    except zmq.Again:
        socket.getsockopt(zmq.EVENTS)  # ZeroMQ learns only now and then what has left its queues: this makes it look
        _hand_over(socket, pieces)


def _hand_over(socket: Socket, pieces: Sequence[Frame]) -> None:
    last = len(pieces) - 1
    for index, piece in enumerate(pieces):
        socket.send(piece, _MORE if index < last else _LAST, copy=len(piece) < ZERO_COPY_BYTES)


class Received(NamedTuple):
    """A message that came, or what is wrong with it."""

    peer: bytes
    parts: list[memoryview]
    last: zmq.Frame
    problem: Malformed | None = None


FindRoom = Callable[[bytes, bytes | None, zmq.Frame], memoryview | None]
"""Called with the peer of a message, the name of the shared memory that it brings (None: it brings none) and its last piece so far. Returns
the memory in which the message's long parts may lie."""


def receive(socket: Socket, limits: Limits, find_room: FindRoom, *, addressed: bool) -> Received:
    """The message that waits; `addressed`: it begins with the name of its peer. Short parts are not copied; long ones are put together."""
    pieces = _Pieces(socket)
    peer = pieces.next().bytes if addressed else b""
    try:
        parts = _put_together(pieces, limits, lambda reference, last: find_room(peer, reference, last))
    except Malformed as problem:
        return Received(peer, [], pieces.drain(), problem)
    return Received(peer, parts, pieces.drain())


class NotShared(Oversized):
    """A message whose long parts lie in memory that this process does not know. Its sender sends it again without that memory."""

    def __init__(self, number: int) -> None:
        super().__init__("frames in memory that is not shared with this process", number)
        self.reason = NOT_SHARED


def _put_together(pieces: _Pieces, limits: Limits, find_room: Callable[[bytes | None, zmq.Frame], memoryview | None]) -> list[memoryview]:
    first = pieces.next()
    announced = first.buffer
    if not 8 <= len(announced) <= _LONGEST_SIZES or len(announced) % 8:
        raise Malformed("a message that does not say how long its parts are")
    sizes: list[int] = list(struct.unpack(f">{len(announced) // 8}Q", announced))
    reference = pieces.next().bytes if sizes[0] & SHARED else None
    shared = [bool(size & SHARED) for size in sizes[1:]]
    room = find_room(reference, first) if reference is not None or any(shared) else None
    sizes = [size & ~SHARED for size in sizes]
    header, largest = pieces.part(sizes[0]) if sizes[0] <= limits.header_bytes else None, max(sizes[1:], default=0)
    if header is None or len(sizes) - 1 > limits.frames or largest > limits.frame_bytes:
        number = decode([header], limits)[0] if header is not None else 0
        raise Oversized(
            f"a message of {len(sizes) - 1} frames of up to {largest:,} bytes with a header of {sizes[0]:,}; "
            f"at most {limits.frames} frames of {limits.frame_bytes:,} bytes with a header of {limits.header_bytes:,} are allowed",
            number,
        )
    there = SharedReader(room) if room is not None else None
    parts = [header]
    for size, is_shared in zip(sizes[1:], shared, strict=True):
        part = pieces.part(size) if not is_shared else None if there is None else there.next(size)
        if part is None:
            raise NotShared(decode([header], limits)[0])
        parts.append(part)
    if pieces.more:
        raise Malformed("more parts than the message says it has")
    return parts


class _Pieces:
    """The parts of the waiting message that were not read yet."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._last: zmq.Frame | None = None

    @property
    def more(self) -> bool:
        return self._last is None or bool(self._last.more)

    def next(self) -> zmq.Frame:
        if not self.more:
            raise Malformed("a message that ends too early")
        self._last = self._socket.recv(zmq.NOBLOCK, copy=False)
        return self._last

    def part(self, size: int) -> memoryview:
        if size <= PIECE_BYTES:
            return self._of(size)
        from shoal.protocol.buffer_pool import take_buffer  # NumPy is loaded where long frames come

        whole = take_buffer(size)
        for start in range(0, size, PIECE_BYTES):
            whole[start : start + PIECE_BYTES] = self._of(min(PIECE_BYTES, size - start))
        return whole

    def _of(self, size: int) -> memoryview:
        piece: memoryview = self.next().buffer
        if len(piece) != size:
            raise Malformed("a part that is not as long as the message says")
        return piece

    def drain(self) -> zmq.Frame:
        """Let go of what is left. Return the last piece, which knows the connection that it came over."""
        while self.more:
            self.next()
        assert self._last is not None
        return self._last
