"""The side that answers: an HTTP server with a thread for each connection.

There are so many connections at a time (`places.py`), and who has not shown the token yet gives its place up first.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import socketserver
import threading
import time
from typing import Any

from shoal.errors import ShoalError
from shoal.protocol.address_groups import household
from shoal.transports import addresses, keys, wire
from shoal.transports.connection_limits import HEADER_BYTES, Beginnings, Places, hang_up
from shoal.transports.interface import Message, Request, Traffic
from shoal.transports.request_queue import Desk
from shoal.transports.request_rate import SLOWEST_BYTES_PER_S, Rate
from shoal.transports.xmlrpc.encoding import most_body_bytes, only_here, pack, unpack

MOST_CONNECTIONS = 256
IDLE_S = 30.0
"""How long a connection may dawdle over its request."""
LINGER_S = 2.0


class XmlRpcServer:
    """Each connection has a thread that waits until its answer is given."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        max_frame_bytes: int,
        max_header_bytes: int = wire.HEADER_BYTES,
        rate: Rate = Rate(),  # noqa: B008 - a tuple
        insecure: bool = False,
    ) -> None:
        host = addresses.resolve(host)
        only_here(host, insecure)
        port = port or addresses.free_port(host) or 0
        self.traffic = Traffic()
        self._desk = Desk(wire.Limits(max_frame_bytes, max_header_bytes), self.traffic, rate)
        try:
            self._http = _HttpServer(host, port, self._desk, token)
        except OSError as problem:
            raise ShoalError(f"cannot listen on {host} port {port}: {problem.strerror}. Is another coordinator running?") from None
        self.address = str(addresses.Address("http", addresses.to_tell(host), self._http.server_address[1]))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="shoal-http", daemon=True)
        self._thread.start()

    def poll(self, timeout_s: float) -> list[Request]:
        return self._desk.poll(timeout_s)

    def reply(self, request: Request, message: Message) -> None:
        self._desk.reply(request, message)

    def wake(self) -> None:
        self._desk.wake()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._desk.close()
        self._http.hang_up()
        self._http.server_close()


class _HttpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Knows its connections, so that it can limit them, and end them when it closes."""

    allow_reuse_address = os.name == "posix"
    request_queue_size = 64

    def __init__(self, host: str, port: int, desk: Desk, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.desk = desk
        self.expected = f"Bearer {token}".encode()
        self.connections = Places[socket.socket](MOST_CONNECTIONS)
        self.closing = threading.Event()
        super().__init__((host, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        has_room, leaving = self.connections.take(request, household(str(client_address[0])), time.monotonic())
        if leaving is not None:
            hang_up(leaving)
        if leaving is not None or not has_room:
            self.desk.traffic.refuse("crowded")
        return has_room

    def service_actions(self) -> None:
        """Called twenty times a second."""
        for stranger in self.connections.slow_strangers(time.monotonic()):
            hang_up(stranger)

    def shutdown_request(self, request: Any) -> None:
        self.connections.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: a client may break off at any time."""

    def hang_up(self) -> None:
        """Ask for nothing more, let answers leave that were given, then end what is left."""
        self.closing.set()
        for how, patience_s in ((socket.SHUT_RD, LINGER_S), (socket.SHUT_RDWR, 0.0)):
            for connection in self.connections.all():
                hang_up(connection, how)
            deadline = time.monotonic() + patience_s
            while self.connections.all() and time.monotonic() < deadline:
                time.sleep(0.005)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Reads calls, queues them at the desk, and writes the answers."""

    server: _HttpServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = Beginnings(self.rfile)

    def handle_one_request(self) -> None:
        self.rfile.left = HEADER_BYTES
        super().handle_one_request()

    def do_GET(self) -> None:
        """Whether the token is right, which a client asks before it sends much."""
        if self._authorised():
            self._respond(200, b"")

    def do_POST(self) -> None:
        if not self._authorised() or not self._measured():
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.connections.hear(self.connection, is_busy=True)
        try:
            waiting = self.server.desk.ask(self._peer(), unpack(body, answer=False), str(self.client_address[0]))
        except wire.Malformed as problem:
            self._turn_away(400, problem.reason)
            return
        while not self._gone():
            with contextlib.suppress(TimeoutError):
                if parts := waiting.answer(1.0):
                    self._respond(200, pack(parts, answer=True))
                break
        self.server.desk.forget(waiting)
        self.server.connections.hear(self.connection, is_busy=False)

    def _authorised(self) -> bool:
        if keys.same(self.headers.get("Authorization", "").encode(), self.server.expected):
            self.server.connections.hear(self.connection, is_busy=False)
            return True
        self._turn_away(401, "unauthorised")
        return False

    def _measured(self) -> bool:
        """Whether the body says how long it is, and may be."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            self._turn_away(411, "malformed")
            return False
        if int(length) > most_body_bytes(self.server.desk.limits):
            self._turn_away(413, "oversized")
            return False
        return True

    def _turn_away(self, status: int, reason: str) -> None:
        self.server.desk.traffic.refuse(reason)
        self.close_connection = True
        self._respond(status, reason.encode())

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.connection.settimeout(IDLE_S + len(body) / SLOWEST_BYTES_PER_S)
        self.wfile.write(body)
        self.connection.settimeout(IDLE_S)

    def _gone(self) -> bool:
        """Whether the client hung up: nothing else can make its connection readable while it waits for us."""
        self.connection.settimeout(0.0)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self.server.closing.is_set()
        finally:
            self.connection.settimeout(IDLE_S)
        return True

    def _peer(self) -> bytes:
        return f"{self.client_address[0]}:{self.client_address[1]}".encode()

    def log_message(self, format: str, *args: Any) -> None:
        """Only the command line prints."""
