"""The page /metrics over HTTP: one text, for programs such as Prometheus that poll it. A client can only read it."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from shoal.errors import ShoalError
from shoal.transports import addresses
from shoal.transports.http_server import LimitedHandler, LimitedHttpServer

_MOST_CONNECTIONS = 32
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format."""


class MetricsPage(LimitedHttpServer):
    """Serves the newest figures. `token`: what a reader must send; None: no token is needed."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, token: str | None, text: Callable[[], str]) -> None:
        self.expected = None if token is None else f"Bearer {token}".encode()
        self.text = text
        host = addresses.resolve(host)
        try:
            super().__init__(host, port, _MetricsHandler, _MOST_CONNECTIONS)
        except OSError as problem:
            raise ShoalError(f"coordinator.metrics_port: cannot listen on {host} port {port}: {problem.strerror}") from None
        self.address = f"{addresses.Address('http', addresses.to_tell(host), self.server_address[1])}/metrics"
        self.start("shoal-metrics")

    def close(self) -> None:
        self.stop()
        self.server_close()


class _MetricsHandler(LimitedHandler):
    server: MetricsPage

    def do_GET(self) -> None:
        expected = self.server.expected
        if self.path.partition("?")[0] != "/metrics":
            self._respond(404, "the figures are at /metrics\n")
        elif expected is not None and not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
            problem = "the token is wrong" if "Authorization" in self.headers else "a token is needed"
            self._respond(401, f"{problem}: Authorization: Bearer TOKEN\n", WWW_Authenticate="Bearer")
        else:
            self._respond(200, self.server.text())

    def _respond(self, status: int, text: str, **headers: str) -> None:
        self.respond(status, CONTENT_TYPE, text.encode(), **headers)
