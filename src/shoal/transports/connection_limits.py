"""The connections that an HTTP server of this process has: so many in all, and from one address three quarters of them.

Where all places are taken, the connection that has been silent for longest, of those that have not shown a token yet, gives its place up to
the next one; where there is none, one that has, and that waits for nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)
_SHARE_OF_AN_ADDRESS = 3 / 4
"""However many places there are, one address leaves some to the others."""
STRANGERS_S = 10.0
"""How long one that has not shown the token may take to do so, however it sends its words."""
HEADER_BYTES = 16 << 10
"""What comes before a question's body may have at most: http.server alone would take megabytes from a stranger."""


def hang_up(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Its thread hears of it, and closes it."""
    with contextlib.suppress(OSError):  # it may have ended meanwhile
        connection.shutdown(how)


class Place:
    """A connection: where it is from, since when it is silent, and whether it has shown the token."""

    def __init__(self, address: str, now: float) -> None:
        self.address, self.came_at, self.heard_at = address, now, now
        self.is_stranger = True
        self.is_busy = False
        """Whether it waits for an answer, or sends a question."""


class Places(Generic[Connection]):
    """The connections there are. Any thread may call it."""

    def __init__(self, most: int) -> None:
        self.most, self.most_of_an_address = most, int(_SHARE_OF_AN_ADDRESS * most)
        self._lock = threading.Lock()
        self._places: dict[Connection, Place] = {}

    def all(self) -> list[Connection]:
        with self._lock:
            return list(self._places)

    def take(self, connection: Connection, address: str, now: float) -> tuple[bool, Connection | None]:
        """Whether there is a place for one more, and who has to give up its own for that."""
        with self._lock:
            own = [one for one, place in self._places.items() if place.address == address]
            among = own if len(own) >= self.most_of_an_address else list(self._places) if len(self._places) >= self.most else None
            leaving = None if among is None else self._longest_silent(among)
            if among is not None and leaving is None:
                return False, None
            if leaving is not None:
                del self._places[leaving]
            self._places[connection] = Place(address, now)
            return True, leaving

    def _longest_silent(self, among: list[Connection]) -> Connection | None:
        idle = [one for one in among if not self._places[one].is_busy]
        return min(idle, key=lambda one: (not self._places[one].is_stranger, self._places[one].heard_at), default=None)

    def hear(self, connection: Connection, *, is_busy: bool) -> None:
        """It has shown the token, and asks something, or was answered."""
        with self._lock:
            if (place := self._places.get(connection)) is not None:
                place.is_stranger, place.is_busy, place.heard_at = False, is_busy, time.monotonic()

    def slow_strangers(self, now: float) -> list[Connection]:
        with self._lock:
            return [one for one, place in self._places.items() if place.is_stranger and now - place.came_at > STRANGERS_S]

    def leave(self, connection: Connection) -> None:
        with self._lock:
            self._places.pop(connection, None)


class Beginnings:
    """What a connection to an HTTP server sends. The lines before a question's body are bounded together."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.left = stream, HEADER_BYTES

    def readline(self, most: int) -> bytes:
        line: bytes = self._stream.readline(min(most, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise ConnectionAbortedError("a question that begins with too many words")
        return line

    def read(self, size: int) -> bytes:
        found: bytes = self._stream.read(size)
        return found

    def close(self) -> None:
        self._stream.close()
