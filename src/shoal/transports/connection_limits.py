"""Limits on the connections that a server of this process has: in all, and from one address.

Each connection takes a file descriptor, and a run that cannot open a file ends. So there are fewer connections than descriptors, and one
address gets three quarters of them at most. When all are taken, a new connection replaces the one that has been silent for longest among
those that have not authenticated; then among those that have and wait for nothing. Where there is none, the new connection is refused.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from shoal.protocol.address_groups import address_group

Connection = TypeVar("Connection", bound=Hashable)
RESERVED_DESCRIPTORS = 256
"""For files, processes and whatever else the run opens."""
AUTHENTICATION_S = 10.0
"""How long a connection may take to authenticate, however it sends its bytes."""
_SHARE_OF_AN_ADDRESS = 3 / 4
_LEAST = 16


def within_descriptor_limit(wanted: int) -> int:
    """How many connections this process can have. The system is asked for more descriptors where it allows too few."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        more = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, max(_LEAST, soft - RESERVED_DESCRIPTORS))


class _State:
    def __init__(self, address: str, now: float) -> None:
        self.address, self.accepted_at, self.active_at = address, now, now
        self.is_authenticated = False
        self.is_busy = False
        """Whether it waits for an answer, or sends a request."""


class ConnectionLimiter(Generic[Connection]):
    """Holds: at most `most` connections, and at most `most_per_address` from one address. Any thread may call it."""

    def __init__(self, most: int, most_per_address: int | None = None) -> None:
        self.most = within_descriptor_limit(most)
        share = int(_SHARE_OF_AN_ADDRESS * self.most)
        self.most_per_address = max(1, share if most_per_address is None else min(most_per_address, share))
        self._lock = threading.Lock()
        self._states: dict[Connection, _State] = {}
        self._counts: Counter[str] = Counter()

    def all(self) -> list[Connection]:
        with self._lock:
            return list(self._states)

    def add(
        self, connection: Connection, address: str, now: float, has_authenticated: Callable[[Connection], bool] = lambda connection: False
    ) -> Connection | None:
        """Add a connection from an address. Returns the connection that the caller must close: one that is evicted for it, or itself if it
        is refused; None if there is room. `has_authenticated`: asked before a connection is evicted that was not marked as authenticated,
        where the server learns of that late; one that has is never evicted then."""
        group = address_group(address)
        with self._lock:
            self._remove(connection)
            evicted: Connection | None = None
            is_address_full = self._counts[group] >= self.most_per_address
            if is_address_full or len(self._states) >= self.most:
                among = [one for one, state in self._states.items() if state.address == group or not is_address_full]
                evicted = self._longest_silent(among, has_authenticated)
                if evicted is None:
                    return connection
                self._remove(evicted)
            self._states[connection] = _State(group, now)
            self._counts[group] += 1
            return evicted

    def _longest_silent(self, among: list[Connection], has_authenticated: Callable[[Connection], bool]) -> Connection | None:
        states = self._states
        idle = [one for one in among if not states[one].is_busy]
        for connection in sorted(idle, key=lambda one: (states[one].is_authenticated, states[one].active_at)):
            if states[connection].is_authenticated or not has_authenticated(connection):
                return connection
            states[connection].is_authenticated = states[connection].is_busy = True
        return None

    def mark_authenticated(self, connection: Connection, *, is_busy: bool) -> None:
        """The connection has authenticated, and sends a request or was answered."""
        with self._lock:
            if (state := self._states.get(connection)) is not None:
                state.is_authenticated, state.is_busy, state.active_at = True, is_busy, time.monotonic()

    def overdue(self, now: float) -> list[Connection]:
        """Connections that have not authenticated in time."""
        with self._lock:
            return [one for one, state in self._states.items() if not state.is_authenticated and now - state.accepted_at > AUTHENTICATION_S]

    def remove(self, connection: Connection) -> None:
        with self._lock:
            self._remove(connection)

    def _remove(self, connection: Connection) -> None:
        if (state := self._states.pop(connection, None)) is not None:
            self._counts[state.address] -= 1
            if not self._counts[state.address]:
                del self._counts[state.address]
