"""Limits on connections for uvicorn, which by itself accepts every connection and waits for its client for ever.

A connection is busy only while the server owes an answer. While the server waits for the client (for a request, for the rest of its body,
or for the client to read), the connection has a deadline, and a new client may take its place (transports/connection_limits.py).
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum, auto
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.transports.connection_limits import AUTHENTICATION_S, ConnectionLimiter
from shoal.transports.request_rate import overdue_at

MOST_CONNECTIONS = 1000
BODY_S = 10.0
"""How long the body of a request may take, beside the time that its bytes take on the slowest link."""
READING_S = 30.0
"""How long a client may leave the bytes unread that were sent to it. The system buffers megabytes, so a slow client reads in leaps."""


class ClientStep(Enum):
    """What a connection waits for its client to do."""

    SEND_REQUEST = auto()
    """The request line and headers."""
    SEND_BODY = auto()
    READ = auto()


class LimitedProtocol(H11Protocol):
    """A connection. It counts as authenticated once it has sent a request."""

    limiter: ClassVar[ConnectionLimiter[Any]]
    """Of the server that the connection belongs to."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._step: ClientStep | None = None
        self._since, self._received = 0.0, 0
        self._timer: asyncio.TimerHandle | None = None
        ended = self.limiter.add(self, str((self.client or ("",))[0]), time.monotonic())
        self._follow()
        if ended is not None:
            ended.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._follow()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self.limiter.remove(self)
        super().connection_lost(exc)

    def _next_step(self) -> ClientStep | None:
        """What the client is to do next; None: the server is to answer."""
        has_answered = self.cycle is None or self.cycle.response_complete
        if self.flow.write_paused or (has_answered and self.transport.get_write_buffer_size()):
            return ClientStep.READ
        if self.conn.their_state is h11.SEND_BODY:
            return ClientStep.SEND_BODY
        return ClientStep.SEND_REQUEST if has_answered else None

    def _follow(self) -> None:
        """Begin to wait for what the client is to do now, unless that is what was waited for before."""
        step = self._next_step()
        if step is self._step:
            return
        self._step, self._since, self._received = step, self.loop.time(), 0
        if self.cycle is not None:
            self.limiter.mark_authenticated(self, is_busy=step is None)
        self._set_timer(self._overdue_at() if step is not None else None)

    def _overdue_at(self) -> float:
        if self._step is ClientStep.READ:
            return self._since + READING_S
        return overdue_at(self._since, BODY_S if self._step is ClientStep.SEND_BODY else AUTHENTICATION_S, self._received)

    def _set_timer(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self.loop.call_at(due, self._end_if_overdue)

    def _end_if_overdue(self) -> None:
        self._follow()  # a client may have read all since the answer was complete
        if self._step is None or (due := self._overdue_at()) > self.loop.time():
            self._set_timer(None if self._step is None else due)
        else:
            self.transport.abort()


def bounded_server(app: Any) -> uvicorn.Server:
    """A server for an app, with limits on its connections, on the bytes before a request's body, and on the time that a client takes."""
    bounds: dict[str, Any] = {"http": _limited_protocol(), "timeout_graceful_shutdown": 5, "h11_max_incomplete_event_size": 65536}
    # A connection that turned into a web socket would leave these limits
    # uvicorn's own configuration of logging closes the handlers of every library in this process, and absl's closes standard error
    return uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", lifespan="off", ws="none", **bounds))


def _limited_protocol() -> type[asyncio.Protocol]:
    """uvicorn's protocol class for one server."""
    return type("OneServersProtocol", (LimitedProtocol,), {"limiter": ConnectionLimiter[Any](MOST_CONNECTIONS)})
