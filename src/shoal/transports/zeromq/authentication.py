"""Authentication of connections: ZeroMQ asks here before it takes a message from a new one (ZAP, https://rfc.zeromq.org/spec/27).

A thread of its own, so that a coordinator that is busy with aggregation does not keep new workers waiting, and a client with a wrong token
is refused at once. The same thread enforces the limits on connections and on their bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from shoal.transports.connection_limits import ConnectionLimiter
from shoal.transports.interface import Traffic
from shoal.transports.wakeup import Wakeup
from shoal.transports.zeromq.byte_limits import CHECK_EVERY_S, CHECK_UNAUTHENTICATED_EVERY_S, ByteLimiter
from shoal.transports.zeromq.sockets import Socket, borrow_socket, shut_down

DOMAIN = b"shoal"
FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unauthorised",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "unauthorised",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake",  # broken off by the other side, perhaps without bad intent
}
_PAUSE_FACTOR = 5
"""The pause after a check, as a multiple of the time that the check took."""
WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | sum(FAILED)

Admits = Callable[[bytes, list[bytes]], str | None]
"""Whose invitation (empty: the run's token) admits a mechanism with these credentials; None: they are refused."""


class ZapAuthenticator:
    """Serves one server's socket, from before it is bound, and counts the handshakes that fail."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        server: Socket,
        admits: Admits,
        traffic: Traffic,
        byte_limiter: ByteLimiter,
        connections: ConnectionLimiter[int],
        on_ended: Callable[[int], None] = lambda descriptor: None,
    ) -> None:
        """`on_ended`: called, in the authenticator's thread, with the descriptor of a connection that has ended."""
        self._admits, self._on_ended = admits, on_ended
        self.connections = connections
        self._traffic = traffic
        self._byte_limiter = byte_limiter
        self._check_at = self._check_unauthenticated_at = 0.0
        self._closing = Wakeup()
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._server = server
        self._events = server.get_monitor_socket(WATCHED)
        self._thread = threading.Thread(target=self._serve, name="shoal-authentication", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.wake()
        self._thread.join()
        self._server.disable_monitor()
        for ended in (self._events, self._zap):
            ended.close(linger=0)
        self._closing.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._events, self._closing):
            poller.register(source, zmq.POLLIN)
        while True:
            wait_s = CHECK_UNAUTHENTICATED_EVERY_S if self._byte_limiter.unauthenticated else CHECK_EVERY_S
            ready = dict(poller.poll(int(1000 * wait_s) if len(self._byte_limiter) else None))
            if self._zap in ready:
                self._authenticate(self._zap.recv_multipart())
            while self._events in ready and self._events.poll(0):  # all there are: connections may come faster than they are checked
                self._on_event(recv_monitor_message(self._events))
            if self._closing.fileno() in ready:
                return
            self._check_bytes(time.monotonic())

    def _check_bytes(self, now: float) -> None:
        """End connections that sent too much. Unauthenticated ones are checked more often, but never for most of the time."""
        if now < self._check_unauthenticated_at:
            return
        check_all = now >= self._check_at
        for _ in range(self._byte_limiter.end_over_limit(only_unauthenticated=not check_all)):
            self._traffic.refuse("oversized")
        if check_all:
            self._check_at = now + CHECK_EVERY_S
        self._check_unauthenticated_at = now + max(CHECK_UNAUTHENTICATED_EVERY_S, _PAUSE_FACTOR * (time.monotonic() - now))

    def _on_event(self, message: Mapping[str, Any]) -> None:
        descriptor: int = message["value"]
        if message["event"] == zmq.EVENT_ACCEPTED:
            self._limit(descriptor)
            self._byte_limiter.on_accepted(descriptor)
        elif message["event"] == zmq.EVENT_DISCONNECTED:
            self._byte_limiter.on_ended(descriptor)
            self.connections.remove(descriptor)
            self._on_ended(descriptor)
        else:
            self._traffic.refuse(FAILED[message["event"]])

    def _limit(self, descriptor: int) -> None:
        self.connections.remove(descriptor)
        try:
            with borrow_socket(descriptor) as connection:
                address = str(connection.getpeername()[0])
        except OSError:  # it has ended meanwhile
            return
        ended = self.connections.add(descriptor, address, time.monotonic(), self._byte_limiter.has_authenticated)
        if ended is not None:
            shut_down(ended)
            self._traffic.refuse("crowded")

    def _authenticate(self, request: list[bytes]) -> None:
        version, number, domain, _address, _identity, mechanism, *credentials = request
        guest = self._admits(mechanism, credentials) if version == b"1.0" and domain == DOMAIN else None
        status, text = (b"200", b"welcome") if guest is not None else (b"400", b"the token is wrong")
        self._zap.send_multipart([b"1.0", number, status, text, (guest or "").encode(), b""])
