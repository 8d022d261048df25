"""The server's side: HTTP with a thread for each connection. The token is checked before a body is read."""

from __future__ import annotations

import contextlib
import socket
import time

from shoal.errors import ShoalError
from shoal.transports import addresses, keys, wire
from shoal.transports.http_server import LimitedHandler, LimitedHttpServer, shut_down
from shoal.transports.interface import ListenOptions
from shoal.transports.request_queue import QueueServer
from shoal.transports.request_rate import Rate
from shoal.transports.xmlrpc.encoding import most_body_bytes, pack, require_loopback, unpack

MOST_CONNECTIONS = 256
IDLE_S = 30.0
"""How long a request may take to arrive, and an answer to be read, beside the time that the bytes take on the slowest link."""
LINGER_S = 2.0


class XmlRpcServer(LimitedHttpServer, QueueServer):
    """Each connection has a thread that waits until its answer is given."""

    def __init__(self, port: int, options: ListenOptions, rate: Rate = Rate()) -> None:  # noqa: B008 - a tuple
        host = addresses.resolve(options.hosts[0])
        require_loopback(host, options.insecure)
        port = port or addresses.free_port(host) or 0
        self.expected = f"Bearer {options.token}".encode()
        QueueServer.__init__(self, options.max_frame_bytes, rate)
        try:
            LimitedHttpServer.__init__(self, host, port, _XmlRpcHandler, MOST_CONNECTIONS)
        except OSError as problem:
            how = "Is another coordinator running? --set transport.port=P chooses another port, 0 any free one"
            raise ShoalError(f"cannot listen on {host} port {port}: {problem.strerror}. {how}") from None
        self.address = str(addresses.Address("http", addresses.to_tell(host), self.server_address[1]))
        self.start("shoal-http")

    def on_crowded(self) -> None:
        self.traffic.refuse("crowded")

    def close(self) -> None:
        """Accept no more requests, send the replies that were given, then end all connections."""
        self.stop()
        QueueServer.close(self)
        for how, patience_s in ((socket.SHUT_RD, LINGER_S), (socket.SHUT_RDWR, 0.0)):
            for connection in self.connections.all():
                shut_down(connection, how)
            deadline = time.monotonic() + patience_s
            while self.connections.all() and time.monotonic() < deadline:
                time.sleep(0.005)
        self.server_close()


class _XmlRpcHandler(LimitedHandler):
    """Reads calls, puts them into the queue of requests, and writes the replies."""

    server: XmlRpcServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Whether the token is right, which a client asks before it sends much."""
        if self._authorised():
            self._respond(200, b"")

    def do_POST(self) -> None:
        if not self._authorised() or not self._measured():
            return
        body = self.read_body(int(self.headers["Content-Length"]))
        self.server.connections.mark_authenticated(self.connection, is_busy=True)
        try:
            pending = self.server.add(self._peer(), unpack(body, answer=False), str(self.client_address[0]))
        except wire.Malformed as problem:
            self._turn_away(400, problem.reason)
            return
        while not self._gone():
            with contextlib.suppress(TimeoutError):
                if parts := pending.wait(1.0):
                    self._respond(200, pack(parts, answer=True))
                break
        self.server.forget(pending)
        self.server.connections.mark_authenticated(self.connection, is_busy=False)

    def _authorised(self) -> bool:
        if keys.same(self.headers.get("Authorization", "").encode(), self.server.expected):
            self.server.connections.mark_authenticated(self.connection, is_busy=False)
            return True
        self._turn_away(401, "unauthorised")
        return False

    def _measured(self) -> bool:
        """Whether the body says how long it is, and may be."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            self._turn_away(411, "malformed")
            return False
        if int(length) > most_body_bytes(self.server.limits):
            self._turn_away(413, "oversized")
            return False
        return True

    def _turn_away(self, status: int, reason: str) -> None:
        self.server.traffic.refuse(reason)
        self.close_connection = True
        self._respond(status, reason.encode())

    def _respond(self, status: int, body: bytes) -> None:
        self.respond(status, "text/xml", body, **({"Connection": "close"} if self.close_connection else {}))

    def _gone(self) -> bool:
        """Whether the client hung up: nothing else can make its connection readable while it waits for us."""
        self.connection.settimeout(0.0)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self.server.closed
        return True

    def _peer(self) -> bytes:
        return f"{self.client_address[0]}:{self.client_address[1]}".encode()
