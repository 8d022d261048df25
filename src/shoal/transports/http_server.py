"""An HTTP server with a thread for each connection, and limits on what a client costs before it has authenticated."""

from __future__ import annotations

import contextlib
import http.server
import io
import os
import socket
import socketserver
import threading
import time
from typing import Any, ClassVar

from shoal.transports.connection_limits import AUTHENTICATION_S, ConnectionLimiter
from shoal.transports.request_rate import SLOWEST_BYTES_PER_S, overdue_at

HEADER_BYTES = 16 << 10
"""The most bytes before a request's body: http.server alone would take megabytes from any client."""


def shut_down(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End a connection that a thread uses; the thread closes it."""
    with contextlib.suppress(OSError):  # it may have ended meanwhile
        connection.shutdown(how)


class LimitedHttpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Closes connections over the limit and connections that do not authenticate in time."""

    allow_reuse_address = os.name == "posix"
    request_queue_size = 64

    def __init__(self, host: str, port: int, handler: type[LimitedHandler], most_connections: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.connections = ConnectionLimiter[socket.socket](most_connections)
        super().__init__((host, port), handler)

    def start(self, name: str) -> None:
        """Serve in a thread of this name."""
        self._serving = threading.Thread(target=self.serve_forever, args=(0.1,), name=name, daemon=True)
        self._serving.start()

    def stop(self) -> None:
        """Accept no more connections. Existing ones continue."""
        self.shutdown()
        self._serving.join()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        ended = self.connections.add(request, str(client_address[0]), time.monotonic())
        if ended is not None:
            self.on_crowded()
            if ended is not request:
                shut_down(ended)
        return ended is not request

    def on_crowded(self) -> None:
        """Called when a connection was refused or closed because there are too many."""

    def service_actions(self) -> None:
        """Called by `serve_forever` at its poll interval."""
        for connection in self.connections.overdue(time.monotonic()):
            shut_down(connection)

    def shutdown_request(self, request: Any) -> None:
        self.connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: a client may break off at any time."""


class LimitedHandler(http.server.BaseHTTPRequestHandler):
    """Bounds the request line and headers of each request together, and the time that a client takes to send and to read."""

    timeout: ClassVar[float] = AUTHENTICATION_S
    """Seconds that a client may take for the request line and headers, for a body and for reading an answer, beside the time that the bytes
    take on the slowest link."""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._arrivals = _TimedReader(self.connection)
        self.rfile: Any = _LimitedReader(io.BufferedReader(self._arrivals))

    def handle_one_request(self) -> None:
        self.rfile.header_bytes_left = HEADER_BYTES
        self._arrivals.begin(self.timeout)
        super().handle_one_request()

    def read_body(self, size: int) -> bytes:
        """The request's body of this size. Raises TimeoutError if it comes too slowly."""
        self._arrivals.begin(self.timeout)
        body: bytes = self.rfile.read(size)
        return body

    def respond(self, status: int, content_type: str, body: bytes, **headers: str) -> None:
        self.connection.settimeout(self.timeout + len(body) / SLOWEST_BYTES_PER_S)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: only the command line prints."""


class _TimedReader(io.RawIOBase):
    """What a connection receives. Raises TimeoutError when bytes are overdue, also if single bytes keep coming."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin(0.0)

    def begin(self, grace_s: float) -> None:
        """Begin to wait for the next part of a request."""
        self._since, self._grace_s, self._received = time.monotonic(), grace_s, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = overdue_at(self._since, self._grace_s, self._received) - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request comes too slowly")
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(buffer)
        self._received += count
        return count


class _LimitedReader:
    def __init__(self, stream: Any) -> None:
        self._stream, self.header_bytes_left = stream, HEADER_BYTES

    def readline(self, most: int) -> bytes:
        line: bytes = self._stream.readline(min(most, self.header_bytes_left + 1))
        self.header_bytes_left -= len(line)
        if self.header_bytes_left < 0:
            raise ConnectionAbortedError("the headers of a request are too long")
        return line

    def read(self, size: int) -> bytes:
        return self._stream.read(size)

    def close(self) -> None:
        self._stream.close()
