"""The connection limiter (transports/connection_limits.py) for uvicorn, which by itself accepts every connection and waits for ever for its
first request."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.transports.connection_limits import AUTHENTICATION_S, ConnectionLimiter

MOST_CONNECTIONS = 1000


def bounded_server(app: Any) -> uvicorn.Server:
    """A server for an app, with limits on its connections and on the bytes before a request's body."""
    bounds: dict[str, Any] = {"http": _limited_protocol(), "timeout_graceful_shutdown": 5, "h11_max_incomplete_event_size": 65536}
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", **bounds))


def _limited_protocol() -> type[asyncio.Protocol]:
    """uvicorn's protocol class, with a limiter for one server. A connection counts as authenticated once it has sent a request."""
    limiter = ConnectionLimiter[Any](MOST_CONNECTIONS)

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._overdue = self.loop.call_later(AUTHENTICATION_S, self._end_if_silent)
            ended = limiter.add(self, str((self.client or ("",))[0]), time.monotonic())
            if ended is not None:
                ended.transport.abort()

        def _end_if_silent(self) -> None:
            if self.cycle is None:  # no request came
                self.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None:
                limiter.mark_authenticated(self, is_busy=not self.cycle.response_complete)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            limiter.mark_authenticated(self, is_busy=False)

        def connection_lost(self, exc: Exception | None) -> None:
            self._overdue.cancel()
            limiter.remove(self)
            super().connection_lost(exc)

    return LimitedProtocol
