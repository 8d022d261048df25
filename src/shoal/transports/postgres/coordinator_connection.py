"""The coordinator's connection: one coordinator at a time, and everything that belongs together in one transaction.

A row says who coordinates, not a lock of a session, so that it holds through poolers. Every transaction checks it. A successor takes over
at once where the old one closed, or its process is dead on this machine, else after some seconds without a sign of life; what the old
one does after that is refused.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psutil
import psycopg

from shoal.errors import ShoalError
from shoal.transports import wire
from shoal.transports.interface import Unreachable
from shoal.transports.postgres import schema
from shoal.transports.postgres.reconnecting import LOST, Connection, ReconnectingConnection, explained
from shoal.transports.postgres.watchdog import Bounds, Watchdog, shut_out_harmful

BEAT_S = 1.5
_PATIENCE_S = 30.0
"""How long a lost connection is tried again."""
SILENT_S = 5.0
VACUUM_BYTES = 64 << 20
"""Deleted rows of this size are vacuumed at once, without waiting for autovacuum, which runs once a minute."""
_BUSY_TABLES = ("parts", "published_parts")
_TAKEN_OVER = "another coordinator has taken over the run in"
_jitter = random.Random()
Result = TypeVar("Result")


class CoordinatorReplaced(ShoalError):
    """Another coordinator has taken over."""


class CoordinatorDatabaseConnection:
    """The coordinator's connection and its transactions. Belongs to one thread.

    Holds: only the newest coordinator of a run commits anything."""

    def __init__(self, conninfo: str, limits: wire.Limits) -> None:
        self.id = uuid.uuid4()
        self.freed_bytes = self.freed_elsewhere = 0
        """Bytes freed since the start, in the main connection and in `in_own_transaction`; they decide when tables are vacuumed."""
        self.connection = ReconnectingConnection(conninfo, ["shoal_inbox"])
        self.replaced = threading.Event()
        """Set when a heartbeat found that another coordinator has taken over."""
        self._open: Connection | None = None
        self._undo: list[Callable[[], None]] = []
        self._under_way: list[Callable[[], None]] = []
        try:
            self.connection.run(schema.check, 0.0)
            self.connection.run(lambda connection: self._take_over(connection, limits), 0.0)
        except BaseException:
            self.connection.close()
            raise
        self._heartbeat = _Heartbeat(conninfo, self, Watchdog(Bounds.for_frames(limits.frame_bytes)))

    def report_to(self, report: Callable[[str], None]) -> None:
        """Call `report` with a text when the database does not answer, and when it does again, in the thread that waits for it."""
        self.connection.warn = report

    # --- one at a time -----------------------------------------------------------------------------

    def _take_over(self, connection: Connection, limits: wire.Limits) -> None:
        mine = (self.id, socket.gethostname(), os.getpid(), limits.frame_bytes, limits.header_bytes)
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('shoal.coordinator'))")
            found = connection.execute(
                "SELECT host, pid, abs(extract(epoch FROM clock_timestamp() - alive_at))::float8 FROM shoal.coordinator"
                " WHERE isfinite(alive_at)"
            ).fetchone()
            if found and found[2] < SILENT_S and _may_be_running(found[0], found[1]):
                raise ShoalError(
                    f"another coordinator (process {found[1]} on {found[0]}) works on {self.connection.name}:"
                    f" stop it, or wait {SILENT_S:g} s after it died"
                )
            (lease_now,) = connection.execute("SELECT shoal.lease_now()").fetchone() or (None,)
            connection.execute("DELETE FROM shoal.coordinator")
            taken = "INSERT INTO shoal.coordinator VALUES (%s, true, %s, %s, clock_timestamp(), %s, %s, clock_timestamp(), %s)"
            connection.execute(taken, (*mine, lease_now))

    def _check_still_coordinator(self, connection: Connection) -> None:
        """Raise CoordinatorReplaced if another coordinator has taken over."""
        if connection.execute("SELECT 1 FROM shoal.coordinator WHERE id = %s FOR KEY SHARE", (self.id,)).fetchone() is None:
            raise CoordinatorReplaced(f"{_TAKEN_OVER} {self.connection.name}: this one stops")

    def _begin(self, connection: Connection) -> uuid.UUID:
        """The token of a new transaction: the database shows it once the transaction is committed."""
        token = uuid.uuid4()
        begun = connection.execute(
            "WITH present AS (SELECT 1 FROM shoal.coordinator WHERE id = %s FOR KEY SHARE)"
            " UPDATE shoal.last_commit SET token = %s FROM present",
            (self.id, token),
        )
        if begun.rowcount == 0:
            raise CoordinatorReplaced(f"{_TAKEN_OVER} {self.connection.name}: this one stops")
        return token

    def raise_if_replaced(self) -> None:
        """Raise CoordinatorReplaced if another coordinator has taken over: one that writes nothing would not notice otherwise."""
        if self.replaced.is_set():
            raise CoordinatorReplaced(f"{_TAKEN_OVER} {self.connection.name}: this one stops")

    # --- transactions ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction; within another one, a part of that. Unreachable: the connection was lost, and nothing was done."""
        if self._open is not None:
            yield self._open
            return
        token, done = None, False
        try:
            self._open = self.connection.run(lambda connection: connection, _PATIENCE_S)
            with self._open.transaction():
                token = self._begin(self._open)
                yield self._open
                while self._under_way:
                    self._under_way.pop()()
                done = True
        except LOST as problem:
            self.connection.drop()
            if not (done and self._was_committed(token)):
                self._roll_back()
                raise Unreachable(f"the connection to {self.connection.name} was lost: {str(problem).splitlines()[0]}") from None
        except psycopg.Error as problem:
            self._roll_back()
            raise explained(problem, self.connection.name) from None
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._open = None
            self._undo.clear()
            while self._under_way:
                with contextlib.suppress(Exception):  # the caller gets the error of the transaction
                    self._under_way.pop()()

    def carry_out(self, work: Callable[[], Result]) -> Result:
        """Do `work` in a transaction; if the connection is lost, all of it again, for up to half a minute."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with self.transaction():
                    return work()
            except Unreachable:
                if self._open is not None or time.monotonic() > deadline or self.connection.stopped.wait(0.05):
                    raise

    def in_own_transaction(self, work: Callable[[Connection], Result]) -> Result:
        """From another thread: do `work` in a transaction over a connection of its own. It must be safe to do twice."""

        def whole(connection: Connection) -> Result:
            with connection.transaction():
                self._check_still_coordinator(connection)
                return work(connection)

        with contextlib.closing(ReconnectingConnection(self.connection.address)) as line:
            return line.run(whole, _PATIENCE_S)

    def before_commit(self, wait: Callable[[], None]) -> None:
        """Call `wait` before the open transaction commits. It returns when work elsewhere that the transaction needs is done, or raises."""
        self._under_way.append(wait)

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Call `undo` if the open transaction is rolled back."""
        self._undo.append(undo)

    def _roll_back(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _was_committed(self, token: uuid.UUID | None) -> bool:
        """Whether a transaction whose commit was not confirmed was committed. While it is in progress, the row is locked."""
        asked = "SELECT token FROM shoal.last_commit FOR UPDATE"
        return self.connection.run(lambda connection: connection.execute(asked).fetchone(), _PATIENCE_S) == (token,)

    def fetch(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query, within the open transaction or on their own."""
        return self.run(lambda connection: connection.execute(query.encode(), values, binary=True).fetchall())

    def run(self, work: Callable[[Connection], Result]) -> Result:
        """Do `work` over the connection, within the open transaction or on its own."""
        return self.connection.run(work, _PATIENCE_S) if self._open is None else work(self._open)

    def close_connection(self) -> None:
        self._heartbeat.close()
        self.connection.stop()
        stopped = (
            "UPDATE shoal.coordinator SET alive_at = '-infinity', beat_at = clock_timestamp() - interval '5 s',"
            " lease_at = shoal.lease_now() - interval '5 s' WHERE id = %s"
        )
        self.connection.execute_last(stopped, (self.id,))
        self.connection.close()


class _Heartbeat:
    """Heartbeats, vacuum and the watchdog, in a thread with a connection of its own, while the coordinator computes."""

    def __init__(self, conninfo: str, coordinator: CoordinatorDatabaseConnection, watchdog: Watchdog) -> None:
        self._connection = ReconnectingConnection(conninfo)
        self._coordinator = coordinator
        self._watchdog = watchdog
        self._vacuumed_bytes = 0
        self._beaten_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="shoal-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._connection.stopped.wait(BEAT_S * _jitter.uniform(0.8, 1.2)):  # so that statements cannot be timed around it
            with contextlib.suppress(ShoalError):  # the coordinator's own connection reports the problem
                self._connection.run_once(self._beat)

    def _beat(self, connection: Connection) -> None:
        now = time.monotonic()
        beat = (
            "UPDATE shoal.coordinator SET alive_at = clock_timestamp(), beat_at = clock_timestamp(),"
            " lease_at = lease_at + make_interval(secs => least(%s::float8, 5)) WHERE id = %s"
        )
        done = connection.execute(beat, (now - self._beaten_at, self._coordinator.id))
        self._beaten_at = now
        if done.rowcount == 0:
            self._coordinator.replaced.set()
            self._coordinator.connection.wake()
        freed = self._coordinator.freed_bytes + self._coordinator.freed_elsewhere
        if freed - self._vacuumed_bytes > VACUUM_BYTES:
            self._vacuumed_bytes = freed
            for table in _BUSY_TABLES:
                connection.execute(f"VACUUM (SKIP_LOCKED, TRUNCATE FALSE) shoal.{table}")
        connection.execute("SELECT shoal.end_harmful_connections(), shoal.end_slow_enrollments()")
        shut_out_harmful(connection, self._watchdog, time.monotonic())

    def close(self) -> None:
        self._connection.stop()
        self._thread.join()
        self._connection.close()


def _may_be_running(host: str, pid: int) -> bool:
    """Whether a process may be running: always so on another machine. A zombie is not running."""
    if host != socket.gethostname():
        return True
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
