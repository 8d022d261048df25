"""How many connections a server of pages and answers has: no more than there are descriptors for, and strangers give their places up.

uvicorn takes whoever comes, and waits for a first question for ever. Here a connection has a moment to ask something. Where all places are
taken, the one that has been silent for longest, and waits for no answer, is closed in favour of the next (transports/connection_limits.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.protocol.address_groups import household
from shoal.transports.connection_limits import STRANGERS_S, Places
from shoal.transports.zeromq.connection_limits import room_for

MOST_CONNECTIONS = 1000


def bounded_server(app: Any) -> uvicorn.Server:
    """A server for an app, with such bounds."""
    bounds: dict[str, Any] = {"http": _bounded_protocol(), "timeout_graceful_shutdown": 5, "h11_max_incomplete_event_size": 65536}
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", **bounds))


def _bounded_protocol() -> type[asyncio.Protocol]:
    """What uvicorn speaks with its clients, for one server."""
    places = Places[Any](room_for(MOST_CONNECTIONS))

    class Bounded(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._looking = self.loop.call_later(STRANGERS_S, self._look)
            has_room, leaving = places.take(self, household(str((self.client or ("",))[0])), time.monotonic())
            for ended in (leaving, None if has_room else self):
                if ended is not None:
                    ended.transport.abort()

        def _look(self) -> None:
            if self.cycle is None:  # it has asked nothing
                self.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None:
                places.hear(self, is_busy=not self.cycle.response_complete)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            places.hear(self, is_busy=False)

        def connection_lost(self, exc: Exception | None) -> None:
            self._looking.cancel()
            places.leave(self)
            super().connection_lost(exc)

    return Bounded
