"""A connection to the database that is made again whenever it is lost, and that receives notifications while it waits."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo as conninfos
from psycopg import errors

from shoal.errors import ShoalError
from shoal.transports.database_address import parse, split_pin
from shoal.transports.interface import Refused, Unreachable, WrongToken
from shoal.transports.postgres import access
from shoal.transports.wakeup import Wakeup

Connection = access.Connection
LOST = (psycopg.OperationalError, psycopg.InterfaceError)
_CONNECTING: dict[str, str | int] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "shoal",
}
_FOR_GOOD = (
    "password",
    "does not exist",
    "no pg_hba.conf entry",
    "not permitted to log in",
    "permission denied",
    "invalid",
    "authentication",
)
"""Parts of a server's refusal that trying again will not change. (Such an error arrives as text, without its code.)"""
_PASSING = ("tuple concurrently updated", "tuple concurrently deleted")
"""Errors of a statement that met another one in the server's own tables, as where several roles are made at once: trying again helps."""
_OWN_CODES = {"SH001": "unknown-worker", "SH002": "malformed", "SH003": "quarantined"}
"""The error codes of Shoal's own SQL functions, and the reason that `Refused` has for each."""
_LONGEST_PAUSE_S = 2.0
_FINISHING_S = 1.0
"""When a connection is closed, a statement that runs on it has this long to finish."""
_WARN_AFTER_S = 0.5
"""The first pause between two attempts that is reported to the user."""
_jitter = random.Random()
"""Not Python's shared generator: a program that seeds that one would make all workers try again at the same moment."""
Result = TypeVar("Result")


class ReconnectingConnection:
    """One connection. `run`, `wait` and `close` belong to one thread at a time; `wake`, `stop` and `abort` to any."""

    def __init__(self, conninfo: str, channels: Sequence[str] = (), warn: Callable[[str], None] = lambda text: None) -> None:
        """`channels`: the notifications to listen to; `warn`: called when the database does not answer and is tried again."""
        self.warn = warn
        self.address = conninfo
        self._access = parse(conninfo)
        conninfo, self._pin = split_pin(conninfo)
        self.conninfo = conninfos.make_conninfo(conninfo, **_CONNECTING | _given(conninfo))
        self.name = f"the database {self._access.database} at {self._access.host}:{self._access.port}"
        self.connect_count = 0
        """How many times a connection was made."""
        self.stopped = threading.Event()
        self._channels = channels
        self._connection: Connection | None = None
        self._wakeup = Wakeup()
        self._notified = False
        self._notifications = 0

    def run(self, work: Callable[[Connection], Result], patience_s: float) -> Result:
        """Do `work` over the connection; if it is lost, again over a new one. So `work` must be safe to do twice."""
        deadline, pause, warned = time.monotonic() + patience_s, 0.02, False
        while True:
            try:
                result = self.run_once(work)
            except Unreachable as problem:
                if time.monotonic() + pause > deadline or self.stopped.wait(pause * _jitter.uniform(0.7, 1.3)):
                    raise
                if pause < _WARN_AFTER_S <= 2 * pause:
                    warned = True
                    self.warn(self._lost_text(problem, patience_s))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                if warned:
                    self.warn(f"{self.name} answers again: going on")
                return result

    def _lost_text(self, problem: Unreachable, patience_s: float) -> str:
        """What has happened, and what happens next."""
        again = f"trying again for up to {patience_s:.0f} s"
        if not self.connect_count:
            return f"warning: {problem}; {again}"
        return f"warning: {self.name} does not answer any more; {again}. What was confirmed is kept, and the work goes on by itself"

    def run_once(self, work: Callable[[Connection], Result]) -> Result:
        """Do `work` without trying again. Raises Unreachable if the connection was lost, or the server is shutting down."""
        try:
            return work(self.connection())
        except LOST as problem:
            self.drop()
            raise Unreachable(f"the connection to {self.name} was lost: {_first_line(problem)}") from None
        except psycopg.Error as problem:
            if any(sign in str(problem) for sign in _PASSING):
                raise Unreachable(f"{self.name} was busy: {_first_line(problem)}") from None
            raise explained(problem, self.name) from None

    def connection(self) -> Connection:
        if self.stopped.is_set():
            raise Unreachable("the connection was closed on this side")
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Connection:
        where = conninfos.make_conninfo(self.conninfo, **access.trust(self._access, self._pin))
        try:
            connection = psycopg.connect(where, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as problem:
            text, explanation = _first_line(problem), access.explained(problem, self._access)
            if isinstance(explanation, WrongToken):
                raise explanation from None
            if any(sign in text for sign in _FOR_GOOD) and "starting up" not in text:
                raise Refused(str(explanation), "unauthorised") from None
            raise Unreachable(str(explanation)) from None
        connection.add_notify_handler(lambda notify: self._on_notification())
        for channel in self._channels:
            connection.execute(f"LISTEN {channel}")
        self.connect_count += 1
        return connection

    def _on_notification(self) -> None:
        self._notified = True
        self._notifications += 1

    def wait(self, timeout_s: float) -> None:
        """Wait for a notification, `wake`, the loss of the connection, or the timeout. A notification since the last `wait` counts."""
        if not self._notified and timeout_s > 0:
            self._wait_for_bytes(timeout_s)
        self._notified = False
        self._wakeup.clear()

    def _wait_for_bytes(self, timeout_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ)
            connection = self._connection
            if connection is not None and not connection.closed:
                selector.register(connection.fileno(), selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(timeout_s)]
        if connection is not None and not connection.closed and any(source is not self._wakeup for source in ready):
            try:
                connection.pgconn.consume_input()
                while connection.pgconn.notifies():
                    self._on_notification()
            except LOST:
                self.drop()

    def notification_count(self) -> int:
        """How many notifications have come so far, without waiting for one. They still count for `wait`."""
        self._wait_for_bytes(0.0)
        return self._notifications

    def wake(self) -> None:
        self._wakeup.wake()

    def drop(self) -> None:
        """Close the connection, in whatever state it is."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
        self._connection = None

    def stop(self) -> None:
        """From any thread: end a wait, and make no new connection."""
        self.stopped.set()
        self._wakeup.wake()

    def abort(self) -> None:
        """From any thread: break the connection, so that a thread that waits for the server gets an error. A hanging server or a pulled
        cable would otherwise block it until the system's own timeout."""
        connection = self._connection
        with contextlib.suppress(OSError, psycopg.Error):  # it may be closing at this moment
            if connection is not None:
                with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
                    duplicate.shutdown(socket.SHUT_RDWR)

    def execute_last(self, query: str, values: Sequence[Any]) -> None:
        """Execute a last statement after `stop`, if there is a connection."""
        if self._connection is not None and not self._connection.closed:
            with contextlib.suppress(psycopg.Error):
                self._connection.execute(query.encode(), values)

    def close(self) -> None:
        self.stop()
        self.drop()
        self._wakeup.close()

    def close_shared(self, lock: threading.Lock | threading.RLock, query: str | None = None, values: Sequence[Any] = ()) -> None:
        """Close a connection whose users hold this lock, after a last statement. A user that waits for the server for long is aborted."""
        if self.stopped.is_set():
            return
        self.stop()
        if not lock.acquire(timeout=_FINISHING_S):
            self.abort()
            lock.acquire()
        try:
            if query is not None:
                self.execute_last(query, values)
            self.close()
        finally:
            lock.release()


def _given(conninfo: str) -> dict[str, Any]:
    try:
        return dict(conninfos.conninfo_to_dict(conninfo))
    except psycopg.ProgrammingError:
        raise ShoalError("this is not the address of a database: postgresql://user:password@host:5432/database is expected") from None


def explained(problem: psycopg.Error, where: str) -> ShoalError:
    """The ShoalError for an error of the database."""
    text = _first_line(problem)
    if problem.sqlstate in _OWN_CODES:
        return Refused(text, _OWN_CODES[problem.sqlstate])
    if isinstance(problem, errors.InsufficientPrivilege):
        return Refused(f"{where} does not allow this: {text}. Ask for a role made by `shoal db grant`", "unauthorised")
    if isinstance(problem, (errors.InvalidSchemaName, errors.UndefinedTable, errors.UndefinedFunction)):
        return ShoalError(f"{where} is not prepared for a run, or by another version of Shoal ({text}): run `shoal db init`")
    return ShoalError(f"{where} refuses: {text}")


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]
