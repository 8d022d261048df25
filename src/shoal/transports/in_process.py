"""Threads of one process: the same promises as over a network, with nothing copied but the header.

Frames are passed without a copy, so the client must not write to them until it has its reply.
"""

from __future__ import annotations

import itertools
import threading
import time

from shoal.config.schema.cluster import InProcess
from shoal.errors import ShoalError
from shoal.transports import keys, wire
from shoal.transports.interface import ConnectOptions, ListenOptions, Message, Traffic, Unreachable, wrong_token
from shoal.transports.request_queue import PendingRequest, QueueServer
from shoal.transports.request_rate import Rate

SCHEME = "in-process://"

_servers: dict[str, InProcessServer] = {}
_changed = threading.Condition()
_names = itertools.count(1)
_peers = itertools.count(1)


class InProcessServer(QueueServer):
    """Known by name to the clients of this process for as long as it is open."""

    def __init__(
        self,
        name: str | None = None,
        *,
        token: str,
        max_frame_bytes: int,
        rate: Rate = Rate(),  # noqa: B008 - a tuple
    ) -> None:
        super().__init__(max_frame_bytes, rate)
        self.address = SCHEME + (name or f"server-{next(_names)}")
        self._token = token.encode()
        with _changed:
            if self.address in _servers:
                raise ShoalError(f"{self.address} is in use in this process")
            _servers[self.address] = self
            _changed.notify_all()

    def admits(self, token: bytes) -> bool:
        if keys.same(token, self._token):
            return True
        self.traffic.refuse("unauthorised")
        return False

    def close(self) -> None:
        with _changed:
            if _servers.get(self.address) is self:
                del _servers[self.address]
        super().close()


class InProcessClient:
    """Finds its server by name with every call, so a server that was closed and opened again is found."""

    def __init__(self, address: str, *, token: str, max_frame_bytes: int) -> None:
        self.address = address
        self.traffic = Traffic()
        self._token = token.encode()
        self._limits = wire.Limits(max_frame_bytes)
        self._peer = str(next(_peers)).encode()
        self._number = 0
        self._calling = threading.Lock()
        self._pending: PendingRequest | None = None
        self._closed = False

    def call(self, message: Message, timeout_s: float) -> Message:
        with self._calling:
            self._number += 1
            deadline = time.monotonic() + timeout_s
            server = self._find(deadline)
            parts = wire.encode_request(message, self._number, self._limits)
            self.traffic.send(wire.size_of(parts))
            # The caller may write to its frames when it is answered, and the server may keep them.
            pending = self._pending = server.add(self._peer, [bytes(part) for part in parts])
            try:
                return self._answer(pending, deadline)
            finally:
                self._pending = None
                server.forget(pending)

    def _find(self, deadline: float) -> InProcessServer:
        with _changed:
            _changed.wait_for(lambda: self._closed or self.address in _servers, max(0.0, deadline - time.monotonic()))
            if self._closed:
                raise Unreachable("the connection was closed on this side")
            if self.address not in _servers:
                raise Unreachable(f"no coordinator answers at {self.address}: there is no such server in this process")
            server = _servers[self.address]
        if not server.admits(self._token):
            raise wrong_token(self.address)
        return server

    def _answer(self, pending: PendingRequest, deadline: float) -> Message:
        try:
            parts = [] if self._closed else pending.wait(deadline - time.monotonic())
        except TimeoutError:
            raise Unreachable(f"no answer from {self.address} in time") from None
        if not parts:
            raise Unreachable(f"the connection to {self.address} was lost before the answer came")
        self.traffic.receive(wire.size_of(parts))
        return wire.decode(parts, self._limits)[1]

    def close(self) -> None:
        with _changed:
            self._closed = True
            _changed.notify_all()
        if pending := self._pending:
            pending.give_up()


def serve(settings: InProcess, options: ListenOptions) -> InProcessServer:
    return InProcessServer(token=options.token, max_frame_bytes=options.max_frame_bytes)


def connect(options: ConnectOptions) -> InProcessClient:
    return InProcessClient(options.address, token=options.token, max_frame_bytes=options.max_frame_bytes)
