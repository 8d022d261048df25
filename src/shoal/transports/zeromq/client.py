"""The client's side: a DEALER socket, and a monitor that reports why no reply comes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from shoal.errors import ShoalError
from shoal.transports import addresses, keys, wire
from shoal.transports.interface import Frame, Message, Refused, Traffic, Unreachable, wrong_token
from shoal.transports.wakeup import Wakeup
from shoal.transports.zeromq import upload_permits
from shoal.transports.zeromq.shared_frames import ClientMemory, room_for
from shoal.transports.zeromq.sockets import (
    LEAST_PATIENCE_S,
    NOT_SHARED,
    USER,
    Received,
    SharedRoom,
    Socket,
    most_patience_s,
    port_of,
    receive,
    send,
    tune,
)

BROKEN_S = 2.0
"""Handshakes that break for so long are no accident, such as a coordinator that is starting behind a tunnel."""

_PERMIT_ANSWER_S, _PERMIT_PATIENCE_S = 15.0, 60.0

_MOST_REFUSALS = 2
"""After this number of refusals no memory is offered any more: one may be due to a connection that was made anew."""
_MOST_UNANSWERED = 2
_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_WATCHED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class _ClientSocket:
    """A socket to the server, and what its monitor reported about the connection."""

    def __init__(self, context: zmq.Context[Socket], wakeup: Wakeup) -> None:
        self.socket: Socket = context.socket(zmq.DEALER)
        self.events: Socket = self.socket.get_monitor_socket(_WATCHED)
        self.connected = False
        self.broken_since: float | None = None
        self.unanswered_since: float | None = None
        self.port: int | None = None
        """This side's port, where the server is on this machine."""
        self._pollers = {wanted: zmq.Poller() for wanted in (zmq.POLLIN, zmq.POLLOUT)}
        for wanted, poller in self._pollers.items():
            poller.register(self.socket, wanted)
            poller.register(self.events, zmq.POLLIN)
            poller.register(wakeup, zmq.POLLIN)

    def wait(self, writing: bool, timeout_s: float) -> tuple[bool, bool]:
        """Wait until the socket is ready, the connection changed, or `wakeup`; returns whether the first, and whether the second."""
        wanted = zmq.POLLOUT if writing else zmq.POLLIN
        ready = dict(self._pollers[wanted].poll(max(0, int(timeout_s * 1000) + 1)))
        happened = self.events in ready
        return self.socket in ready or (happened and bool(self.socket.poll(0, wanted))), happened  # an answer may come with the loss

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close(linger=0)
        self.socket.close(linger=0)


class ZmqClient:
    """One worker's connection to its coordinator. It connects at the first call, and again whenever that is needed."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        server_key: str | None,
        max_frame_bytes: int,
        local: str | None = None,
        share: bool = True,
    ) -> None:
        """`local`: the address of this machine to connect from, where it has several; null: as the system chooses. `share`: whether long
        frames lie in shared memory where the server is a process of this machine."""
        target = addresses.parse(address)
        if server_key is None:
            _require_loopback(target.host)
        elif not keys.is_key(server_key):
            raise Refused("the server's key must be 40 characters, as the coordinator printed it", "wrong-key")
        keys.check(token)
        self.address = address
        self.traffic = Traffic()
        self._target = target
        self._local = f"{addresses.bracketed(local)}:0;" if local else ""
        self._limits = wire.Limits(max_frame_bytes)
        self._token, self._server_key = token, server_key
        self._context: zmq.Context[Socket] = zmq.Context()
        self._wakeup = Wakeup()
        self._line: _ClientSocket | None = None
        self._number = 0
        self._patience_s = LEAST_PATIENCE_S
        self._calling = threading.RLock()
        self._closed = False
        self._parts: list[Frame] = []
        """The request that is under way."""
        self._memory: ClientMemory | None = None
        self._unanswered_memories: list[ClientMemory] = []
        """Memory with requests that this client gave up: the server may still read them."""
        self._longest_answer = 0
        """Bytes of the long frames of the longest answer."""
        self._refusals = 0 if share else _MOST_REFUSALS
        """How often the server could not use the memory that this client offered."""

    def call(self, message: Message, timeout_s: float) -> Message:
        with self._calling:  # no other request may come between this one and its reply
            deadline = self._post(message, timeout_s)
            return self.answer(deadline - time.monotonic())

    def post(self, message: Message, timeout_s: float) -> None:
        self._post(message, timeout_s)

    def _post(self, message: Message, timeout_s: float) -> float:
        """Send a request; returns when its answer must have come. The time in which a large one waits for a permit does not count."""
        with self._calling:
            self._expect_open()
            parts = self._encoded(message)
            line = self._line = self._line or self._connect()
            with self._giving_up(line):
                if (size := wire.size_of(parts)) >= upload_permits.LARGE_BYTES:
                    self._wait_for_permit(line, size)
                    parts = self._encoded(message)  # the permit's answer had the number before
                deadline = time.monotonic() + timeout_s
                self._ask(line, parts, deadline)
                return deadline

    def _encoded(self, message: Message) -> list[Frame]:
        self._number += 1
        return wire.encode_request(message, self._number, self._limits)

    def _wait_for_permit(self, line: _ClientSocket, size: int) -> None:
        """Wait until the server lets a large message come, for a minute at most. Raises Unreachable if it does not answer."""
        patience = time.monotonic() + _PERMIT_PATIENCE_S
        while time.monotonic() < patience:
            deadline = time.monotonic() + _PERMIT_ANSWER_S
            self._ask(line, self._encoded(Message({"kind": upload_permits.KIND, "bytes": size})), deadline)
            if self._answer(line, deadline).header != upload_permits.LATER:
                return

    def answer(self, timeout_s: float) -> Message:
        with self._calling:
            self._expect_open()
            if (line := self._line) is None:
                raise Unreachable(f"the connection to {self.address} was lost before the answer came")
            with self._giving_up(line):
                return self._answer(line, time.monotonic() + timeout_s)

    def is_connected(self) -> bool:
        """Whether the other side is there at this moment, as far as is known. Before the first call it is not."""
        with self._calling:
            if self._line is None or self._closed:
                return False
            self._follow(self._line, in_flight=False)
            return self._line.connected

    def _expect_open(self) -> None:
        if self._closed:
            raise Unreachable("the connection was closed on this side")

    @contextlib.contextmanager
    def _giving_up(self, line: _ClientSocket) -> Iterator[None]:
        try:
            yield
        except (Unreachable, Refused):
            self._give_up(line)
            raise

    def _connect(self) -> _ClientSocket:
        try:
            host = addresses.resolve(self._target.host)  # for every new connection: a coordinator may have moved
        except ShoalError as problem:
            raise Unreachable(str(problem)) from None
        line = _ClientSocket(self._context, self._wakeup)
        tune(line.socket, self._limits, [host])
        line.socket.linger = 0
        line.socket.reconnect_ivl, line.socket.reconnect_ivl_max = 50, 500
        line.socket.connect_timeout = 5000
        self._present_credentials(line.socket)
        line.socket.connect(f"tcp://{self._local}{addresses.bracketed(host)}:{self._target.port}")
        return line

    def _present_credentials(self, socket: Socket) -> None:
        if self._server_key is None:
            socket.plain_username, socket.plain_password = USER, self._token.encode()
            return
        own = keys.keys_from_token(self._token)
        socket.curve_publickey, socket.curve_secretkey = own.public.encode(), own.secret.encode()
        socket.curve_serverkey = self._server_key.encode()

    def _ask(self, line: _ClientSocket, parts: list[Frame], deadline: float) -> None:
        self._follow(line, in_flight=False)
        while True:
            try:
                send(line.socket, parts, shared=self._share(line, parts))
                self._parts = parts
                line.unanswered_since = line.unanswered_since or time.monotonic()
                return self.traffic.send(wire.size_of(parts))
            except zmq.Again:
                self._wait(line, deadline, writing=True)

    def _share(self, line: _ClientSocket, parts: list[Frame]) -> SharedRoom | None:
        """Where the long frames of a request may lie, and those of its answer. The memory grows with the messages; it is never written to
        while an older request may still be read from it. Messages that need permits travel in pieces: what is shared stays in memory."""
        up, down = room_for(parts), self._longest_answer
        if line.port is None or self._refusals >= _MOST_REFUSALS or not 0 < max(up, down) < upload_permits.LARGE_BYTES:
            return None
        memory = self._memory
        if memory is None or memory.reference.port != line.port or len(memory.up) < up or len(memory.down) < down:
            known = memory.reference if memory is not None else None
            self._forget_memory()
            try:
                self._memory = memory = ClientMemory(max(up, known.up if known else 0), down, line.port)
            except OSError:  # this system has no such memory, or no more of it
                self._refusals = _MOST_REFUSALS
                return None
        return SharedRoom(memory.up, memory.name)

    def _forget_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _forget_unanswered(self, most: int) -> None:
        while len(self._unanswered_memories) > most:
            self._unanswered_memories.pop(0).close()

    def _was_not_shared(self, line: _ClientSocket, answer: Message, deadline: float) -> bool:
        """Whether the server could not read the request from shared memory. Then it is sent again, over the connection alone."""
        if answer.header.get("kind") != "refused" or answer.header.get("reason") != NOT_SHARED:
            return False
        self._refusals += 1
        self._forget_memory()
        self._ask(line, self._parts, deadline)
        return True

    def _find_room(self, peer: bytes, reference: bytes | None, last: zmq.Frame) -> memoryview | None:
        return None if self._memory is None else self._memory.down

    def _answer(self, line: _ClientSocket, deadline: float) -> Message:
        """The answer to this call; answers to calls that timed out are ignored."""
        while True:
            self._wait(line, deadline, writing=False)
            with contextlib.suppress(zmq.Again):
                received = receive(line.socket, self._limits, self._find_room, addressed=False)
                line.unanswered_since, self._patience_s = None, LEAST_PATIENCE_S
                if not (found := self._matching(received)) or not self._was_not_shared(line, found, deadline):
                    self.traffic.receive(wire.size_of(received.parts))
                    if found:
                        self._longest_answer = max(self._longest_answer, room_for(received.parts))
                        self._parts = []
                        self._forget_unanswered(0)
                        return found

    def _matching(self, received: Received) -> Message | None:
        try:
            if received.problem is not None:
                raise received.problem
            number, message = wire.decode(received.parts, self._limits)
        except wire.Malformed as problem:
            self.traffic.refuse(problem.reason)
            if isinstance(problem, wire.Oversized) and problem.number == self._number:  # no other answer will come
                raise Refused(f"the answer is too large: {problem}", problem.reason) from None
            return None
        if number == self._number:
            return message
        self.traffic.refuse("late")
        return None

    def _wait(self, line: _ClientSocket, deadline: float, *, writing: bool) -> None:
        """Until the socket is ready; Unreachable at the deadline, when the connection is lost, or when the client is closed."""
        while True:
            ready, happened = line.wait(writing, deadline - time.monotonic())
            if self._closed:
                raise Unreachable("the connection was closed on this side")
            if ready:
                return
            if happened:
                self._follow(line, in_flight=not writing)
            elif time.monotonic() >= deadline:
                raise Unreachable(self._why(line))

    def _follow(self, line: _ClientSocket, *, in_flight: bool) -> None:
        """Handle the monitor's events. If the connection is lost while a request is in flight, no reply will come."""
        while line.events.poll(0):
            told = recv_monitor_message(line.events)
            event = told["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise wrong_token(self.address)
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                raise Refused(f"{self.address}: one side encrypts and the other does not, or something else listens there", "protocol")
            if event == zmq.EVENT_CONNECTED:
                line.port = port_of(told["value"])
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                line.connected, line.broken_since = True, None
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                line.broken_since = line.broken_since or time.monotonic()
                if time.monotonic() - line.broken_since > BROKEN_S:
                    raise Unreachable(self._why(line))
            elif event == zmq.EVENT_DISCONNECTED and line.connected:
                line.connected, line.port = False, None
                self._forget_memory()
                self._forget_unanswered(0)
                if in_flight:
                    raise Unreachable(f"the connection to {self.address} was lost before the answer came")

    def _why(self, line: _ClientSocket) -> str:
        if line.connected:
            return f"no answer from {self.address} in time"
        if line.broken_since is None:
            return f"no coordinator answers at {self.address}: is the coordinator running, and may this machine reach it?"
        return (
            f"{self.address} breaks the connection off before it is made. Either the server key in the join line is not this "
            "coordinator's, or one side encrypts and the other does not, or something else listens there"
        )

    def _give_up(self, line: _ClientSocket) -> None:
        """After a failed call: keep a slow connection, so that its messages arrive eventually; close a dead one.

        The two cannot be told apart, so patience doubles after each failure.
        """
        if self._memory is not None:  # the server may still read the request from it, or write the answer to it
            self._unanswered_memories.append(self._memory)
            self._memory = None
            self._forget_unanswered(_MOST_UNANSWERED)
        if line.connected and not self._closed:
            if time.monotonic() - (line.unanswered_since or math.inf) < self._patience_s:
                return
            self._patience_s = min(2 * self._patience_s, most_patience_s(self._limits.frame_bytes))
        self._line = None
        line.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wakeup.wake()
        with self._calling:
            self._forget_memory()
            self._forget_unanswered(0)
            if self._line:
                self._line.close()
            self._context.term()
            self._wakeup.close()


def _require_loopback(host: str) -> None:
    if not addresses.is_loopback(host):
        raise Refused(
            f"{host} is another machine: the join line must carry the server's key, so that the token does not travel in clear", "no-key"
        )
