"""The process that serves a dashboard: its port and its access tokens."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shoal.dashboard.app import make_dashboard_app
from shoal.dashboard.watched_runs import WatchedRun
from shoal.errors import ShoalError
from shoal.runs.folder.run_reader import RunFolder
from shoal.transports.addresses import is_loopback
from shoal.web.auth import AuthMiddleware, listening_socket
from shoal.web.uvicorn_limits import bounded_server

GUARDED = ("/api", "/metrics")
_SHORTEST_TOKEN = 16


class DashboardServer:
    """Shows runs on one port, until `stop` or a signal."""

    def __init__(self, folders: Sequence[RunFolder], host: str, ports: Sequence[int], token: str | None, public: bool) -> None:
        """`ports`: the first of them that is free. `public`: for people who only watch."""
        require_token(host, token)
        self.owner_password = "" if public or not is_loopback(host) else secrets.token_urlsafe(18)
        """What a browser of this machine needs to send commands and to learn how to join; empty: the page does neither."""
        runs, password = [WatchedRun(folder) for folder in folders], self.owner_password
        board = make_dashboard_app(runs, ending=lambda: self.server.should_exit, owner_password=password)
        app: Any = AuthMiddleware(board, token, GUARDED, "token")
        self.socket = _first_bound(host, ports)
        self.port: int = self.socket.getsockname()[1]
        self.server = bounded_server(app)

    def run(self) -> None:
        try:
            self.server.run([self.socket])
        finally:
            self.socket.close()

    def stop(self) -> None:
        self.server.should_exit = True


def _first_bound(host: str, ports: Sequence[int]) -> socket.socket:
    for port in ports[:-1]:
        with suppress(ShoalError):
            return listening_socket(host, port)
    return listening_socket(host, ports[-1])


def require_token(host: str, token: str | None) -> None:
    """Raises ShoalError where others than this machine could look without a token."""
    if token is None and not is_loopback(host):
        raise ShoalError(f"{host} can be reached from other machines, so viewers need a token: --public makes one and shows it")
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise ShoalError(f"the token must have {_SHORTEST_TOKEN} letters at least")
