"""Watchdog: what each student uses of a class's server within five minutes. A student who exceeds a bound is put into quarantine.

PostgreSQL bounds single statements and connections. It does not bound a role that begins again and again: statements that each end just in
time, uploads that are rolled back, notifications, connections. So the coordinator adds up, with every heartbeat, what each role has used.

Holds: a student who computes units and hands them in stays within the bounds, however small the units and however slow the server.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from shoal.transports.postgres.reconnecting import Connection

_SLICE_S = 10.0
"""The window moves in steps of this length."""
_LONGEST_TRANSACTION_S = 600.0
"""What a transaction has written is known when it ends, and each of its calls when it is made (see `end_harmful_connections`)."""
_LONGEST_GAP_S = 5.0
"""A heartbeat that comes later counts as if it had come after this time."""
_LONG_S, _SHORT_S = 10.0, 0.1
"""A statement of Shoal's keeps the server busy for less than the one even on a server that is overloaded, and usually for less than the
other."""
_SHORT_SHARE = 0.1
_CONNECTION_S = 0.5
"""What a new connection counts for, in seconds of work."""
_CALL_BYTES = 1 << 14
"""What one counted call may bring (see `count_use`)."""
_CALL_RECORDS, _CALL_WAL_BYTES = 24, 3 * _CALL_BYTES
"""What one counted call may write to the write-ahead log: an upload writes a record for every two kilobytes, and one for their index."""
_LEAST_UPLOAD = 256 << 20
_FRAMES = 8
"""Results of the largest size that may come to nothing within a window, because they were late or a connection was lost."""


class ConnectionUse(NamedTuple):
    """A connection of a student or reader, or with the class's token, as the server shows it."""

    role: str
    pid: int
    began: float
    busy_s: float | None
    """For how long its statement has kept the server busy; None: no statement does."""
    wal_bytes: int
    wal_records: int
    temp_bytes: int


class RoleUse(NamedTuple):
    """What a student's role has used since it was made."""

    role: str
    calls: int
    completed: int


class Use(NamedTuple):
    """What a role used in some time."""

    busy_s: float = 0.0
    calls: int = 0
    completed: int = 0
    wal_bytes: int = 0
    wal_records: int = 0

    def plus(self, other: Use, times: int = 1) -> Use:
        return Use(
            self.busy_s + times * other.busy_s,
            self.calls + times * other.calls,
            self.completed + times * other.completed,
            self.wal_bytes + times * other.wal_bytes,
            self.wal_records + times * other.wal_records,
        )


class Bounds(NamedTuple):
    """What a role may use in a window."""

    calls: int
    calls_for_a_unit: int
    """How many more calls each unit allows that the role has completed."""
    window_s: float = 300.0
    busy_s: float = 60.0
    wal_bytes: int = 256 << 20
    """Beyond what counted calls write."""
    wal_records: int = 10_000
    temp_bytes: int = 256 << 20
    """Of all temporary files at a time: large sorts, and cursors that outlive their transaction."""

    @classmethod
    def for_frames(cls, largest: int) -> Bounds:
        """For a run whose frames have this size at most."""
        return cls(calls=(_LEAST_UPLOAD + _FRAMES * largest) // _CALL_BYTES, calls_for_a_unit=(4 * largest + (1 << 20)) // _CALL_BYTES)

    def exceeded(self, use: Use, calls: int) -> str | None:
        """Why a role may not go on; None: it may. `calls`: those whose transactions may have ended in this window."""
        within = f"within {self.window_s / 60:g} minutes"
        if use.busy_s > self.busy_s:
            return f"it kept the server busy for {use.busy_s:.0f} s {within}"
        if use.calls > self.calls + self.calls_for_a_unit * use.completed:
            size = use.calls * _CALL_BYTES / 1e6
            return f"it made {use.calls} calls or uploads of 16 kB ({size:.0f} MB) {within}, and completed {use.completed} units"
        if use.wal_records - _CALL_RECORDS * calls > self.wal_records:
            return f"it wrote {use.wal_records} records to the server's log of changes {within}, by notifications or other commands"
        if use.wal_bytes - _CALL_WAL_BYTES * calls > self.wal_bytes:
            return f"it wrote {use.wal_bytes / 1e6:.0f} MB to the server's log of changes {within}, by other ways than results"
        return None


class UseWindow:
    """What one role used in the last seconds."""

    def __init__(self, span_s: float) -> None:
        self.total = Use()
        self._span_s = span_s
        self._slices: deque[tuple[float, Use]] = deque()

    def add(self, now: float, use: Use) -> None:
        self.total = self.total.plus(use)
        if self._slices and now - self._slices[-1][0] < _SLICE_S:
            began, before = self._slices.pop()
            self._slices.append((began, before.plus(use)))
        else:
            self._slices.append((now, use))
        while self._slices[0][0] < now - self._span_s:
            self.total = self.total.plus(self._slices.popleft()[1], -1)


class Watchdog:
    """Adds up what each role uses. Pure: the caller brings what the server shows, and the time."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._windows: dict[str, tuple[UseWindow, UseWindow]] = {}
        self._at: float | None = None
        self._older: set[tuple[int, float]] = set()
        """Connections that are older than this watchdog, until they end the transaction whose calls it may not have seen."""
        self._connections: dict[tuple[int, float], ConnectionUse] = {}
        self._roles: dict[str, RoleUse] = {}

    def check(self, now: float, connections: Sequence[ConnectionUse], roles: Sequence[RoleUse]) -> list[tuple[str, str]]:
        """The roles that exceed a bound, and why. A role that was returned begins anew."""
        uses: dict[str, Use] = {}
        if self._at is None:
            self._older = {(one.pid, one.began) for one in connections}
        else:
            uses = self._uses(min(now - self._at, _LONGEST_GAP_S), connections, roles)
        self._at = now
        self._connections = {(one.pid, one.began): one for one in connections}
        self._roles = {one.role: one for one in roles}
        found = {role: why for role, use in uses.items() if (why := self._add(now, role, use)) is not None}
        return list((self._hoarders(connections) | found).items())

    def _hoarders(self, connections: Sequence[ConnectionUse]) -> dict[str, str]:
        """The roles whose temporary files are too large, and why they may not go on."""
        sizes: Counter[str] = Counter()
        for one in connections:
            sizes[one.role] += one.temp_bytes
        most = self.bounds.temp_bytes
        return {role: f"its temporary files took {size / 1e6:.0f} MB of the disk" for role, size in sizes.items() if size > most}

    def _add(self, now: float, role: str, use: Use) -> str | None:
        """Why a role may not go on after this use; None: it may."""
        recent, longer = self._windows.setdefault(
            role, (UseWindow(self.bounds.window_s), UseWindow(self.bounds.window_s + _LONGEST_TRANSACTION_S))
        )
        recent.add(now, use)
        longer.add(now, use)
        why = self.bounds.exceeded(recent.total, longer.total.calls)
        if why is not None:
            del self._windows[role]
        return why

    def _uses(self, elapsed_s: float, connections: Sequence[ConnectionUse], roles: Sequence[RoleUse]) -> dict[str, Use]:
        """What each role used since the last check; roles that used nothing are left out."""
        uses: dict[str, Use] = {}
        busy = sum(one.busy_s is not None for one in connections)
        for one in connections:
            before = self._connections.get((one.pid, one.began))
            seen = before or one._replace(wal_bytes=0, wal_records=0)
            busy_s = elapsed_s * _share(one.busy_s, busy) + (0.0 if before else _CONNECTION_S)
            use = Use(busy_s, wal_bytes=one.wal_bytes - seen.wal_bytes, wal_records=one.wal_records - seen.wal_records)
            if use.wal_records and (one.pid, one.began) in self._older:
                self._older.remove((one.pid, one.began))
                use = Use(busy_s)
            uses[one.role] = uses.get(one.role, Use()).plus(use)
        for role in roles:
            known = self._roles.get(role.role, RoleUse(role.role, 0, 0))
            if role.calls >= known.calls:  # else the role was dropped, and another has its name
                use = Use(calls=role.calls - known.calls, completed=max(0, role.completed - known.completed))
                uses[role.role] = uses.get(role.role, Use()).plus(use)
        return {role: use for role, use in uses.items() if any(use)}


def _share(busy_s: float | None, busy: int) -> float:
    """The part of the elapsed time that counts for a connection. Statements of a usual length hardly count, since a student with small
    units sends many. Longer ones share the time with others that are busy: on an overloaded server all statements take long. The
    longest count in full: no overload explains them."""
    if busy_s is None:
        return 0.0
    if busy_s <= _SHORT_S:
        return _SHORT_SHARE
    return 1.0 if busy_s > _LONG_S else 1.0 / busy


def shut_out_harmful(connection: Connection, watchdog: Watchdog, now: float) -> None:
    """Ask the server what its students use, and shut out those who exceed a bound."""
    connections = [ConnectionUse(*row) for row in connection.execute("SELECT * FROM shoal.student_connections()").fetchall()]
    roles = [RoleUse(*row) for row in connection.execute("SELECT * FROM shoal.student_uses()").fetchall()]
    for role, why in watchdog.check(now, connections, roles):
        connection.execute("SELECT shoal.shut_out(%s, %s)", (role, why))
