"""The server's side: a ROUTER on one or several addresses, whose connections are authenticated in their handshake."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85

from shoal.config.environment import free_memory
from shoal.config.schema.cluster import Zmq
from shoal.errors import ShoalError
from shoal.transports import addresses, keys, wire
from shoal.transports.connection_limits import ConnectionLimiter
from shoal.transports.interface import Guest, ListenOptions, Message, Request, Traffic
from shoal.transports.request_rate import Rate, RateLimit
from shoal.transports.wakeup import Wakeup
from shoal.transports.zeromq import upload_permits
from shoal.transports.zeromq.authentication import DOMAIN, Admits, ZapAuthenticator
from shoal.transports.zeromq.byte_limits import ByteLimiter
from shoal.transports.zeromq.shared_frames import ServerMemories
from shoal.transports.zeromq.sockets import USER, NotShared, Received, SharedRoom, Socket, local_port, receive, send, tune

BATCH, BATCH_BYTES = 64, 256 << 20
"""The most that one poll returns."""
UNFINISHED_BYTES = 8 << 20
"""What a connection may send beyond one message of the largest size before it finishes a message."""
_IO_THREADS, _LINGER_MS = 2, 2000
REQUEST_HEADER_BYTES = 64 << 10
"""The longest header of a request: only replies carry a configuration."""
_BYTES_PER_PERMIT = 1024
"""To look at a long header takes longer, so it counts as several messages."""


class ZmqServer:
    """Listens on one or several addresses of this machine."""

    def __init__(self, settings: Zmq, options: ListenOptions, rate: Rate = Rate()) -> None:  # noqa: B008 - a tuple
        hosts = [addresses.resolve(host) for host in options.hosts]
        _require_key_beyond_loopback(hosts, options.keys)
        keys.check(options.token)
        own = keys.keys_from_secret(options.keys.secret) if options.keys is not None else None
        self.traffic = Traffic()
        self._limits = wire.Limits(options.max_frame_bytes)
        self._request_limits = wire.Limits(options.max_frame_bytes, REQUEST_HEADER_BYTES)
        self._rates = RateLimit(rate)
        self._memories = ServerMemories(options.max_frame_bytes)
        self._wakeup = Wakeup()
        self._context: zmq.Context[Socket] = zmq.Context(_IO_THREADS)
        self._socket: Socket = self._context.socket(zmq.ROUTER)
        tune(self._socket, self._limits, hosts)
        self._socket.router_mandatory = True
        self._socket.linger = _LINGER_MS
        largest_message = self._limits.header_bytes + self._limits.frames * self._limits.frame_bytes
        self._byte_limiter = ByteLimiter(UNFINISHED_BYTES + largest_message, _mechanism(own))
        limiter = ConnectionLimiter[int](settings.connections, settings.connections_per_address)
        admits = _require_credentials(self._socket, options.token, own, options.guests)
        self._authenticator = ZapAuthenticator(self._context, self._socket, admits, self.traffic, self._byte_limiter, limiter)
        at_once = settings.uploads_at_once or _uploads_in_memory(options.max_frame_bytes)
        self._permits = upload_permits.UploadPermits(at_once, largest_message)
        self._poller = zmq.Poller()
        for source in (self._socket, self._wakeup):
            self._poller.register(source, zmq.POLLIN)
        try:
            ports = (settings.port, *options.further_ports)
            self.addresses = tuple(address for port in ports for address in _bind(self._socket, hosts, port))
        except BaseException:
            self.close()
            raise
        self.address = self.addresses[0]

    def poll(self, timeout_s: float) -> list[Request]:
        if self._wakeup.fileno() in dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000)))):
            self._wakeup.clear()
        self._memories.prune(time.monotonic())
        requests: list[Request] = []
        enough = self.traffic.received_bytes + BATCH_BYTES
        with contextlib.suppress(zmq.Again):
            for _ in range(BATCH):
                requests += self._decoded(receive(self._socket, self._request_limits, self._find_room, addressed=True))
                if self.traffic.received_bytes > enough:
                    break
        for answer in self._permits.answers(time.monotonic()):
            self._answer(answer.peer, answer.number, Message(answer.header))
        return requests

    def _decoded(self, received: Received) -> list[Request]:
        """The request in a message, or none. A malformed message gets no reply, and counts for the rate limit; one that is too large is
        refused."""
        peer, parts = received.peer, received.parts
        self._byte_limiter.on_message(received.last)
        self.traffic.receive(wire.size_of(parts))
        admitted = self._rates.admits(peer, time.monotonic(), 1 + (len(parts[0]) if parts else 0) // _BYTES_PER_PERMIT)
        try:
            if received.problem is not None:
                raise received.problem
            if not admitted and len(parts[0]) > _BYTES_PER_PERMIT:
                raise wire.Malformed("a long header from a peer that sends too much", "too-fast")
            number, message = wire.decode(parts, self._request_limits)
        except wire.Malformed as problem:
            if not isinstance(problem, NotShared):
                self.traffic.refuse(problem.reason)
            if isinstance(problem, wire.Oversized) and admitted:
                self._answer(peer, problem.number, wire.refusal(problem.reason, str(problem)))
            return []
        if not admitted:
            self.traffic.refuse("too-fast")
            self._answer(peer, number, wire.refusal("too-fast", self._rates.why))
            return []
        self._memories.note_call(peer, number)
        address = _property(received.last, "Peer-Address")
        if message.header.get("kind") == upload_permits.KIND:
            self._permits.ask(peer, address, number, message.header.get("bytes"), time.monotonic())
            return []
        self._permits.finish(peer)
        return [Request(peer, number, message, _property(received.last, "User-Id"), address)]

    def reply(self, request: Request, message: Message) -> None:
        self._answer(request.peer, request.number, message)

    def _find_room(self, peer: bytes, reference: bytes | None, last: zmq.Frame) -> memoryview | None:
        memory = self._memories.find(peer, reference, lambda: local_port(last))
        return None if memory is None else memory.up

    def _answer(self, peer: bytes, number: int, message: Message) -> None:
        parts = wire.encode(message, number, self._limits)
        room = self._memories.room_for_answer(peer, number)
        try:
            send(self._socket, parts, peer, None if room is None else SharedRoom(room))
        except zmq.ZMQError as problem:
            if problem.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.traffic.refuse("gone")  # the peer has gone, or does not read its answers
        else:
            self.traffic.send(wire.size_of(parts))

    def wake(self) -> None:
        self._wakeup.wake()

    def close(self) -> None:
        if self._socket.closed:
            return
        self._authenticator.close()
        self._socket.close()
        self._context.term()
        self._wakeup.close()


def _uploads_in_memory(size: int) -> int:
    """How many messages of a size a quarter of the free memory holds, and two at least."""
    return max(2, (free_memory() or 0) // 4 // size)


def _require_key_beyond_loopback(hosts: Sequence[str], own: keys.Keys | None) -> None:
    exposed = [host for host in hosts if not addresses.is_loopback(host)]
    if exposed and own is None:
        raise ShoalError(f"{exposed[0]} is reachable from other machines, so what travels must be encrypted: give the server a key pair")


def _property(part: zmq.Frame, name: str) -> str:
    """A property of the sender's connection: the person whose invitation admitted it, as the authenticator said, or its address."""
    try:
        return str(part.get(name))
    except zmq.ZMQError:  # no personal invitation: the run's token
        return ""


def _mechanism(own: keys.Keys | None) -> bytes:
    return b"PLAIN" if own is None else b"CURVE"


def _require_credentials(socket: Socket, token: str, own: keys.Keys | None, guests: Callable[[], Sequence[Guest]]) -> Admits:
    """Set up the server's side of the handshake; returns the check of a client's credentials."""
    socket.zap_domain = DOMAIN
    if own is None:
        socket.plain_server = True
    else:
        socket.curve_server = True
        socket.curve_secretkey = own.secret.encode()

    @functools.cache
    def expected(known: str) -> list[bytes]:
        return [USER, known.encode()] if own is None else [z85.decode(keys.keys_from_token(known).public)]

    def fits(known: str, credentials: list[bytes]) -> bool:
        return len(credentials) == len(expected(known)) and all(map(keys.same, credentials, expected(known)))

    def admits(used: bytes, credentials: list[bytes]) -> str | None:
        if used != _mechanism(own):
            return None
        if fits(token, credentials):
            return ""
        return next((guest.name for guest in guests() if fits(guest.token, credentials)), None)

    return admits


def _bind(socket: Socket, hosts: Sequence[str], port: int) -> tuple[str, ...]:
    """Listen on every host, all with the same port; the addresses that workers should use."""
    public = []
    port = port or addresses.free_port(hosts[0]) or 0
    for host in hosts:
        try:
            socket.bind(f"tcp://{addresses.bracketed(host)}:{port}")
        except zmq.ZMQError as problem:
            how = "Is another coordinator running? --set transport.port=P chooses another port, 0 any free one"
            raise ShoalError(f"cannot listen on {host} port {port}: {problem.strerror}. {how}") from None
        public.append(str(addresses.Address("tcp", addresses.to_tell(host), port)))
    return tuple(public)
