"""One text over HTTP, at /metrics, for programs that come by and read it, such as Prometheus. Whoever comes can do nothing but read."""

from __future__ import annotations

import hmac
import http.server
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.errors import ShoalError
from shoal.protocol.address_groups import household
from shoal.transports import addresses
from shoal.transports.connection_limits import Beginnings, Places, hang_up

_MOST_CONNECTIONS = 32
_IDLE_S = 10.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format."""


class ScrapedPage:
    """A page that shows the newest figures. `token`: what a reader must bring; None: whoever reaches the page may read it."""

    def __init__(self, host: str, port: int, token: str | None, text: Callable[[], str]) -> None:
        host = addresses.resolve(host)
        try:
            self._http = _HttpServer(host, port, token, text)
        except OSError as problem:
            raise ShoalError(f"coordinator.metrics_port: cannot listen on {host} port {port}: {problem.strerror}") from None
        shown = addresses.bracketed(addresses.to_tell(host))
        self.address = f"http://{shown}:{self._http.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.2,), name="shoal-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _HttpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = os.name == "posix"
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, token: str | None, text: Callable[[], str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.expected = None if token is None else f"Bearer {token}".encode()
        self.text = text
        self._places = Places[socket.socket](_MOST_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whoever comes finds a place: who came first, and was not answered yet, gives it up."""
        has_room, leaving = self._places.take(request, household(str(client_address[0])), time.monotonic())
        if leaving is not None:
            hang_up(leaving)
        return has_room

    def service_actions(self) -> None:
        """Called five times a second."""
        for slow in self._places.slow_strangers(time.monotonic()):
            hang_up(slow)

    def shutdown_request(self, request: Any) -> None:
        self._places.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: a reader may break off at any time."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = _IDLE_S

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = Beginnings(self.rfile)

    def do_GET(self) -> None:
        expected = self.server.expected
        if self.path.partition("?")[0] != "/metrics":
            return self._respond(404, "the figures are at /metrics\n")
        if expected is not None and not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
            return self._respond(401, "a token is needed: Authorization: Bearer TOKEN\n")
        return self._respond(200, self.server.text())

    def _respond(self, code: int, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the coordinator's screen is for the run."""
