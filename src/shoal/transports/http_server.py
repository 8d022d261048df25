"""An HTTP server with a thread for each connection, and limits on what a client costs before it has authenticated."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import socketserver
import threading
import time
from typing import Any

from shoal.transports.connection_limits import ConnectionLimiter

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
    """Bounds the request line and headers of each request together."""

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _LimitedReader(self.rfile)

    def handle_one_request(self) -> None:
        self.rfile.header_bytes_left = HEADER_BYTES
        super().handle_one_request()

    def respond(self, status: int, content_type: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: only the command line prints."""


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
