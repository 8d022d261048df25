"""Tunnel between the machines that train one model: carries TCP connections from one machine's 127.0.0.1 to another's, encrypted.

torch's TCPStore and gloo know neither passwords nor encryption, so they listen on 127.0.0.1 only, and a tunnel leads to those of other
machines. Two machines share one ZeroMQ connection, encrypted by CURVE, which the one with the higher rank opens, and in which the TCP
connections that this one makes to the other travel as streams. Both know the other's public key beforehand: the coordinator gave it out.

Holds: only machines whose keys were given out can send anything, and they reach only ports that this machine has exposed. A stream has at
most `_WINDOW` bytes under way, so a connection that is not read stops its sender and no other stream. A lost connection is not made again:
its streams end, and `on_lost` is called.
"""

from __future__ import annotations

import contextlib
import queue
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from typing import NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from shoal.errors import ShoalError
from shoal.protocol.tunnel import LoopbackTunnel
from shoal.transports import addresses, keys
from shoal.transports.connection_limits import ConnectionLimiter
from shoal.transports.interface import Traffic
from shoal.transports.wakeup import Wakeup
from shoal.transports.wire import Limits
from shoal.transports.zeromq.authentication import DOMAIN, ZapAuthenticator
from shoal.transports.zeromq.byte_limits import ByteLimiter
from shoal.transports.zeromq.sockets import PIECE_BYTES, Socket, shut_down, tune

STORE = 0
"""Stands for the port of the first machine's TCPStore."""
CONNECT_S = 120.0
"""How long the other machines may take to connect."""
_CHUNK = 256 << 10
_WINDOW = 4 << 20
_QUEUED = 64
"""Messages that wait to be read from a machine."""
_MOST_STREAMS = 64
"""TCP connections that another machine may open here: gloo opens two or three."""
_MOST_CONNECTIONS = 64
_DELIVER_S = 5.0
"""How long the last bytes may take to arrive when the tunnel is closed."""
_HEADER = struct.Struct(">BQI")
_DIALLED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class TunnelEnds(NamedTuple):
    """What a machine needs to know for its end of the tunnel."""

    secret: str
    """This machine's secret key."""
    public: tuple[str, ...]
    """The public keys of all machines, by rank."""
    address: str
    """Where the first machine listens, such as tcp://192.168.1.10:4000."""


class MessageKind(IntEnum):
    HELLO = auto()
    """The first message of a connection: this machine is there."""
    OPEN = auto()
    """A new stream to an exposed port, which the number names."""
    DATA = auto()
    TAKEN = auto()
    """Bytes of the stream were passed on, and as many more may come."""
    CLOSE = auto()


class _Stream:
    """A TCP connection on this machine, and what is under way to and from it."""

    def __init__(self, rank: int, number: int, connection: sockets.socket) -> None:
        self.rank, self.number, self.connection = rank, number, connection
        self.unconfirmed = 0
        """Bytes that were sent to the other machine, and not passed on there so far."""
        self.outbox = deque[memoryview]()
        self.outbox_bytes = 0
        self.ends = False
        """Whether the other side has closed it: what has arrived is still passed on."""
        self.ended_here = False
        """Whether this side has closed it: it stays until the other machine has passed everything on."""

    @property
    def interests(self) -> int:
        reads = zmq.POLLIN if self.unconfirmed < _WINDOW and not (self.ends or self.ended_here) else 0
        return reads | (zmq.POLLOUT if self.outbox else 0)


class _Peer:
    """Another machine. `socket`: None until it is connected."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.socket: Socket | None = None
        self.events: Socket | None = None
        self.endpoint = ""
        """Where this machine has dialled it."""
        self.identity: bytes | None = None
        self.descriptor = -1
        self.connected = self.lost = False


class Tunnel(LoopbackTunnel):
    """One machine's end. A thread of its own passes everything on; the methods may be called from any other thread."""

    def __init__(self, rank: int, ends: TunnelEnds, hosts: Sequence[str], silence_s: float, on_lost: Callable[[int], None]) -> None:
        """`hosts`: addresses of this machine to listen on; `silence_s`: how long a machine may be silent; `on_lost`: called, in the
        tunnel's thread, with the rank of a machine that is gone or did not come. Raises ShoalError."""
        self.rank, self.size, self._on_lost, self._silence_s = rank, len(ends.public), on_lost, silence_s
        self._ends, self._own = ends, keys.keys_from_secret(ends.secret)
        self._peers = {other: _Peer(other) for other in range(self.size) if other != rank}
        self._exposed: dict[int, int] = {}
        self._listeners: dict[int, tuple[sockets.socket, int, int]] = {}
        self._streams: dict[int, _Stream] = {}
        self._by_descriptor: dict[int, _Stream] = {}
        self._count = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._close_by: float | None = None
        self._connect_by = time.monotonic() + CONNECT_S
        self._context: zmq.Context[Socket] = zmq.Context()
        self.traffic = Traffic()
        self._server, self._authenticator = self._listening(hosts)
        self.addresses = self._bound(hosts, addresses.parse(ends.address).port if rank == 0 else 0)
        """Where this machine listens."""
        self._thread = threading.Thread(target=self._run, name="shoal-tunnel", daemon=True)
        self._thread.start()
        if rank > 0:
            self.dial(0, ends.address)

    # --- for other threads -------------------------------------------------------------------------

    def store_listener(self) -> tuple[int, int]:
        listener = sockets.create_server(("127.0.0.1", 0), backlog=128)
        port = listener.getsockname()[1]
        self._call(lambda: self._exposed.update({STORE: port}))
        return listener.detach(), port

    def store_port(self) -> int:
        return self.port_to(0, STORE)

    def expose(self, port: int) -> None:
        self._call(lambda: self._exposed.update({port: port}))

    def port_to(self, rank: int, port: int) -> int:
        listener = sockets.create_server(("127.0.0.1", 0), backlog=16)
        listener.setblocking(False)
        local: int = listener.getsockname()[1]
        self._call(lambda: self._listeners.update({listener.fileno(): (listener, rank, port)}))
        return local

    def dial(self, rank: int, address: str) -> None:
        self._call(lambda: self._dial(self._peers[rank], address))

    def close(self) -> None:
        self._call(self._begin_to_close)
        self._thread.join()

    def _call(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wakeup.wake()

    # --- the connections between machines ------------------------------------------------------------

    def _listening(self, hosts: Sequence[str]) -> tuple[Socket, ZapAuthenticator]:
        server = self._tuned(zmq.ROUTER, hosts)
        server.router_mandatory = True
        server.zap_domain, server.curve_server = DOMAIN, True
        server.curve_secretkey = self._own.secret.encode()
        limiter = ByteLimiter((_QUEUED + 2) * PIECE_BYTES, b"CURVE")
        connections = ConnectionLimiter[int](_MOST_CONNECTIONS, _MOST_CONNECTIONS)
        self._byte_limiter = limiter
        return server, ZapAuthenticator(self._context, server, self._admits, self.traffic, limiter, connections, self._on_ended)

    def _tuned(self, kind: int, hosts: Sequence[str]) -> Socket:
        made: Socket = self._context.socket(kind)
        tune(made, Limits(_CHUNK), hosts)
        made.sndhwm, made.rcvhwm = 0, _QUEUED  # what is sent is bounded by each stream's window
        made.heartbeat_timeout = int(1000 * self._silence_s)
        made.linger = int(1000 * _DELIVER_S)
        return made

    def _bound(self, hosts: Sequence[str], port: int) -> tuple[str, ...]:
        if self.rank == self.size - 1 > 0:
            return ()  # no machine dials the last one
        host = addresses.resolve(hosts[0])
        port = port or addresses.free_port(host) or 0
        try:
            for one in hosts:
                self._server.bind(f"tcp://{addresses.bracketed(addresses.resolve(one))}:{port}")
        except zmq.ZMQError as problem:
            self._end()
            raise ShoalError(f"cannot listen on {', '.join(hosts)} port {port} for the other machines: {problem.strerror}") from None
        return (str(addresses.Address("tcp", addresses.to_tell(host), port)),)

    def _admits(self, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """The rank of the machine with this key, as text."""
        if mechanism != b"CURVE" or len(credentials) != 1:
            return None
        others = (rank for rank in range(self.rank + 1, self.size) if keys.same(z85.decode(self._ends.public[rank]), credentials[0]))
        return next(map(str, others), None)

    def _dial(self, peer: _Peer, address: str) -> None:
        host, port = addresses.parse(address)[1:]
        made = self._tuned(zmq.DEALER, [addresses.resolve(host)])
        made.curve_publickey, made.curve_secretkey = self._own.public.encode(), self._own.secret.encode()
        made.curve_serverkey = self._ends.public[peer.rank].encode()
        made.reconnect_ivl, made.reconnect_ivl_max = 50, 500
        peer.events = made.get_monitor_socket(_DIALLED)
        peer.socket, peer.endpoint = made, f"tcp://{addresses.bracketed(addresses.resolve(host))}:{port}"
        made.connect(peer.endpoint)
        self._send(peer, MessageKind.HELLO)

    def _send(self, peer: _Peer, kind: MessageKind, stream: int = 0, number: int = 0, payload: bytes | memoryview = b"") -> None:
        header = _HEADER.pack(kind, stream, number)
        if peer.lost:
            return
        assert peer.socket is not None, "a stream is opened by the machine that has dialled"
        try:
            prefix = [] if peer.identity is None else [peer.identity]
            peer.socket.send_multipart([*prefix, header, payload], zmq.NOBLOCK)
        except zmq.ZMQError:  # the other machine is gone; what it sent before is still received
            self._call(lambda: self._lose_after_the_rest(peer))

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                identity, *frames = self._server.recv_multipart(zmq.NOBLOCK, copy=False)
                last = frames[-1] if frames else identity
                self._byte_limiter.on_message(last)
                peer = self._peers[int(last.get("User-Id"))]
                if peer.socket is None and not peer.lost:
                    peer.socket, peer.identity, peer.descriptor, peer.connected = self._server, identity.bytes, last.get(zmq.SRCFD), True
                if peer.identity == identity.bytes:
                    self._on_message(peer, [frame.buffer for frame in frames])
        for peer in self._peers.values():
            if peer.socket is None or peer.socket is self._server:
                continue
            with contextlib.suppress(zmq.Again):
                while not peer.lost:
                    self._on_message(peer, [frame.buffer for frame in peer.socket.recv_multipart(zmq.NOBLOCK, copy=False)])

    def _on_message(self, peer: _Peer, frames: list[memoryview]) -> None:
        if len(frames) != 2 or len(frames[0]) != _HEADER.size or frames[0][0] not in list(MessageKind):
            return self._expel(peer)
        kind, stream, number = _named(frames[0])
        if kind is MessageKind.OPEN:
            return self._open(peer, stream, number)
        found = self._streams.get(stream)
        if found is None or found.rank != peer.rank:
            return None  # it has ended here
        if kind is MessageKind.DATA:
            found.outbox.append(frames[1])
            found.outbox_bytes += len(frames[1])
            if found.outbox_bytes > _WINDOW:
                return self._expel(peer)  # it sends more than it may
            self._write(found)
        elif kind is MessageKind.TAKEN:
            found.unconfirmed = max(0, found.unconfirmed - number)
            self._drop_if_taken(found)
        elif kind is MessageKind.CLOSE:
            found.ends = True
            self._write(found)
        return None

    def _expel(self, peer: _Peer) -> None:
        """End the connection to a machine that sends what it may not."""
        if peer.socket is self._server:
            shut_down(peer.descriptor)
        elif peer.socket is not None:
            peer.socket.disconnect(peer.endpoint)
        self._lose(peer)

    def _on_ended(self, descriptor: int) -> None:
        """From the authenticator's thread: a connection to this machine has ended."""
        self._call(lambda: self._lose_by(descriptor))

    def _lose_by(self, descriptor: int) -> None:
        for peer in self._peers.values():
            if peer.descriptor == descriptor:
                self._lose_after_the_rest(peer)

    def _lose_after_the_rest(self, peer: _Peer) -> None:
        """Lose a machine after what it sent before its end was received."""
        self._receive()
        self._lose(peer)

    def _follow(self, peer: _Peer) -> None:
        """Handle the events of a connection that this machine made."""
        while peer.events is not None and peer.events.poll(0):
            event = recv_monitor_message(peer.events)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                peer.connected = True
            elif peer.connected:
                self._lose_after_the_rest(peer)

    def _lose(self, peer: _Peer) -> None:
        if peer.lost:
            return
        peer.lost = True
        if peer.socket is not None and peer.socket is not self._server:
            peer.socket.linger = 0
        for stream in [one for one in self._streams.values() if one.rank == peer.rank]:
            if not (stream.ends and stream.outbox):  # all of a stream that the other machine has closed is still delivered
                self._drop(stream)
        if self._close_by is None:
            self._on_lost(peer.rank)

    # --- streams -------------------------------------------------------------------------------------

    def _accept(self, listener: sockets.socket, rank: int, port: int) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            if (peer := self._peers[rank]).lost or peer.socket is None:
                connection.close()
                return
            self._count += 1
            number = (self.rank << 32) + self._count
            self._add(_Stream(rank, number, connection))
            self._send(peer, MessageKind.OPEN, number, port)

    def _open(self, peer: _Peer, number: int, port: int) -> None:
        """Connect to the port that another machine asks for, if it is exposed."""
        theirs = sum(one.rank == peer.rank for one in self._streams.values())
        local = self._exposed.get(port)
        if local is None or number >> 32 != peer.rank or number in self._streams or theirs >= _MOST_STREAMS:
            return self._send(peer, MessageKind.CLOSE, number)
        try:
            self._add(_Stream(peer.rank, number, sockets.create_connection(("127.0.0.1", local), 1.0)))
        except OSError:
            self._send(peer, MessageKind.CLOSE, number)

    def _add(self, stream: _Stream) -> None:
        stream.connection.setblocking(False)
        stream.connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
        self._streams[stream.number] = self._by_descriptor[stream.connection.fileno()] = stream

    def _read(self, stream: _Stream) -> None:
        room = min(_CHUNK, _WINDOW - stream.unconfirmed)
        if not room:
            return
        try:
            data = stream.connection.recv(room)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer = self._peers[stream.rank]
        if data:
            stream.unconfirmed += len(data)
            self._send(peer, MessageKind.DATA, stream.number, 0, data)
        else:
            self._send(peer, MessageKind.CLOSE, stream.number)
            stream.ended_here = True
            self._drop_if_taken(stream)

    def _drop_if_taken(self, stream: _Stream) -> None:
        """Drop a stream that has ended here as soon as the other machine has passed all of it on."""
        if stream.ended_here and not stream.unconfirmed:
            self._drop(stream)

    def _write(self, stream: _Stream) -> None:
        taken = 0
        try:
            while stream.outbox:
                count = stream.connection.send(stream.outbox[0])
                taken += count
                rest = stream.outbox.popleft()[count:]
                if len(rest):
                    stream.outbox.appendleft(rest)
        except BlockingIOError:
            pass
        except OSError:
            self._send(self._peers[stream.rank], MessageKind.CLOSE, stream.number)
            return self._drop(stream)
        if taken:
            stream.outbox_bytes -= taken
            self._send(self._peers[stream.rank], MessageKind.TAKEN, stream.number, taken)
        if stream.ends and not stream.outbox:
            self._drop(stream)
        return None

    def _drop(self, stream: _Stream) -> None:
        if self._streams.pop(stream.number, None) is not None:
            del self._by_descriptor[stream.connection.fileno()]
            stream.connection.close()

    # --- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed():
            ready = dict(zmq.zmq_poll(self._interests(), self._patience_ms()))
            if self._wakeup.fileno() in ready:
                self._wakeup.clear()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._commands.get_nowait()()
            self._receive()
            for peer in self._peers.values():
                self._follow(peer)
            for descriptor, events in ready.items():
                if descriptor in self._listeners:
                    self._accept(*self._listeners[descriptor])
                if events & zmq.POLLOUT and (stream := self._by_descriptor.get(descriptor)) is not None:
                    self._write(stream)
                if events & ~zmq.POLLOUT and (stream := self._by_descriptor.get(descriptor)) is not None:
                    self._read(stream)
            self._expect_all()
        self._end()

    def _interests(self) -> list[tuple[Socket | int, int]]:
        dialled = [one for peer in self._peers.values() if not peer.lost for one in (peer.socket, peer.events) if one is not None]
        watched: list[tuple[Socket | int, int]] = [(one, zmq.POLLIN) for one in {self._server, *dialled}]
        watched += [(one, zmq.POLLIN) for one in (self._wakeup.fileno(), *self._listeners)]
        return watched + [(descriptor, wanted) for descriptor, stream in self._by_descriptor.items() if (wanted := stream.interests)]

    def _patience_ms(self) -> int:
        if self._close_by is not None:
            return 10
        missing = any(not peer.connected and not peer.lost for peer in self._peers.values())
        return max(0, int(1000 * (self._connect_by - time.monotonic()))) + 1 if missing else -1

    def _expect_all(self) -> None:
        """Lose the machines that have not connected in time."""
        if time.monotonic() > self._connect_by:
            for peer in self._peers.values():
                if not peer.connected:
                    self._lose(peer)

    def _begin_to_close(self) -> None:
        self._close_by = time.monotonic() + _DELIVER_S

    def _is_closed(self) -> bool:
        """Whether it is to be closed, and everything was delivered or the time is up."""
        if self._close_by is None:
            return False
        if time.monotonic() > self._close_by:
            return True
        reading = [descriptor for descriptor, stream in self._by_descriptor.items() if not stream.ended_here]
        waiting = zmq.zmq_poll([(descriptor, zmq.POLLIN) for descriptor in reading], 0)
        return not waiting and not any(stream.unconfirmed or stream.outbox for stream in self._streams.values())

    def _end(self) -> None:
        for stream in list(self._streams.values()):
            self._drop(stream)
        for listener, _, _ in self._listeners.values():
            listener.close()
        self._authenticator.close()
        for peer in self._peers.values():
            if peer.socket is not None and peer.socket is not self._server:
                peer.socket.disable_monitor()
                assert peer.events is not None
                peer.events.close(linger=0)
                peer.socket.close()
        self._server.close()
        self._context.term()
        self._wakeup.close()


def _named(header: bytes | memoryview) -> tuple[MessageKind, int, int]:
    kind, stream, number = _HEADER.unpack(header)
    return MessageKind(kind), stream, number
