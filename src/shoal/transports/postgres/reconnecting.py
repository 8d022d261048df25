"""A connection to the database that is made again whenever it is lost, and hears notifications while it waits."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.transports.database_address import Access, split_pin
from shoal.transports.interface import Refused, Unreachable
from shoal.transports.postgres import access
from shoal.transports.postgres.certificate_pin import pinned_certificate
from shoal.transports.wakeup import Wakeup

try:
    import psycopg
    from psycopg import conninfo as conninfos
    from psycopg import errors
except ImportError:
    raise ShoalError("PostgreSQL needs a package that is not installed: pip install 'shoal[classroom]'") from None

Connection = psycopg.Connection[tuple[Any, ...]]
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
"""What the server says to somebody it will not let in the next time either. (Such an error reaches us as text, without its code.)"""
_OWN_CODES = {"SH001": "unknown-worker", "SH002": "malformed", "SH003": "quarantined"}
"""The error codes of our own functions, and what a client calls them."""
_LONGEST_PAUSE_S = 2.0
_FINISHING_S = 1.0
"""Whoever asks the server something while the line is closed has so long to hear the answer."""
_TELLING_S = 0.5
"""A pause after which it is no hiccup any more."""
_jitter = random.Random()
"""Not Python's shared generator: whoever seeds that one would make all workers try again at the same moment."""
Result = TypeVar("Result")


class Lock(Protocol):
    """What Python's locks have in common."""

    def acquire(self, *, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


class ReconnectingConnection:
    """One connection. `run`, `wait` and `close` belong to one thread at a time; `ring` to any."""

    def __init__(self, conninfo: str, channels: Sequence[str] = (), tell: Callable[[str], None] = lambda text: None) -> None:
        """`tell`: of a database that does not answer, while it is tried again."""
        self.tell = tell
        conninfo, self._pin = split_pin(conninfo)
        self.conninfo = conninfos.make_conninfo(conninfo, **{k: v for k, v in _CONNECTING.items() if k not in _given(conninfo)})
        self.place = place(conninfo)
        self.connects = 0
        """How often a connection was made."""
        self.hung_up = threading.Event()
        self._channels = channels
        self._connection: Connection | None = None
        self._wakeup = Wakeup()
        self._notified = False
        self._heard = 0

    def run(self, work: Callable[[Connection], Result], patience_s: float) -> Result:
        """Do something over the connection; again, on a new one, when it is lost. So it must be harmless to do twice."""
        deadline, pause = time.monotonic() + patience_s, 0.02
        while True:
            try:
                return self.once(work)
            except Unreachable as problem:
                if time.monotonic() + pause > deadline or self.hung_up.wait(pause * _jitter.uniform(0.7, 1.3)):
                    raise
                if pause < _TELLING_S <= 2 * pause:
                    self.tell(f"{problem}. Trying again")
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def once(self, work: Callable[[Connection], Result]) -> Result:
        """Without trying again. Unreachable: the connection was lost, or the server is busy with ending."""
        try:
            return work(self.connection())
        except LOST as problem:
            self.drop()
            raise Unreachable(f"the connection to {self.place} was lost: {_first_line(problem)}") from None
        except psycopg.Error as problem:
            raise explained(problem, self.place) from None

    def connection(self) -> Connection:
        if self.hung_up.is_set():
            raise Unreachable("the connection was closed on this side")
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Connection:
        if self._pin is not None:
            where = access_of(self.conninfo)
            certificate = pinned_certificate(where.host, where.port, self._pin)
            self.conninfo = conninfos.make_conninfo(self.conninfo, sslmode="verify-ca", sslrootcert=certificate, gssencmode="disable")
        try:
            connection = psycopg.connect(self.conninfo, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError as problem:
            text, told = _first_line(problem), str(access.explained(problem, access_of(self.conninfo)))
            if any(sign in text for sign in _FOR_GOOD) and "starting up" not in text:
                raise Refused(told, "unauthorised") from None
            raise Unreachable(told) from None
        connection.add_notify_handler(lambda notify: self._hear())
        for channel in self._channels:
            connection.execute(f"LISTEN {channel}")
        self.connects += 1
        return connection

    def _hear(self) -> None:
        self._notified = True
        self._heard += 1

    def wait(self, timeout_s: float) -> None:
        """Until a notification, a ring, the loss of the connection, or the timeout. What was heard before counts."""
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
                    self._hear()
            except LOST:
                self.drop()

    def listen(self) -> int:
        """How many notifications there were so far, without waiting for one. They still count for `wait`."""
        self._wait_for_bytes(0.0)
        return self._heard

    def ring(self) -> None:
        self._wakeup.wake()

    def drop(self) -> None:
        """Forget the connection, whatever state it is in."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
        self._connection = None

    def hang_up(self) -> None:
        """From any thread: whoever waits here stops waiting, and no connection is made any more."""
        self.hung_up.set()
        self._wakeup.wake()

    def tear(self) -> None:
        """From any thread: whoever waits for an answer of the server hears that the connection is lost. A server that hangs, or a cable
        that was pulled, would else keep it waiting for as long as the system's own patience lasts."""
        connection = self._connection
        with contextlib.suppress(OSError, psycopg.Error):  # it may be closing at this moment
            if connection is not None:
                with socket.socket(fileno=os.dup(connection.fileno())) as wire:
                    wire.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def alone(self, lock: Lock) -> Iterator[None]:
        """Hold the lock of those who use this line, which was hung up. Whoever waits for the server in it for long is cut off."""
        if not lock.acquire(timeout=_FINISHING_S):
            self.tear()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def farewell(self, query: str, values: Sequence[Any]) -> None:
        """One last statement after `hang_up`, where there is a connection to send it over."""
        if self._connection is not None and not self._connection.closed:
            with contextlib.suppress(psycopg.Error):
                self._connection.execute(query.encode(), values)

    def close(self) -> None:
        self.hang_up()
        self.drop()
        self._wakeup.close()


def conninfo_of(settings: Postgres) -> str:
    """How to reach the configured database."""
    if settings.host == "embedded":
        raise ShoalError("the run's own database is not running: it must be started first, and its address given as transport.host")
    password = settings.password.reveal() if settings.password else None
    return conninfos.make_conninfo(
        "", host=settings.host, port=settings.port, dbname=settings.database, user=settings.user, password=password
    )


def access_of(conninfo: str) -> Access:
    """The way into a database, as it is told to people."""
    given = _given(conninfo)
    host = given.get("host") or given.get("hostaddr") or "localhost"
    return Access(host, int(given.get("port", 5432)), given.get("dbname", ""), given.get("user", ""))


def place(conninfo: str) -> str:
    """The database in words, without anything secret."""
    where = access_of(conninfo)
    return f"the database {where.database} at {where.host}:{where.port}"


def _given(conninfo: str) -> dict[str, Any]:
    try:
        return dict(conninfos.conninfo_to_dict(conninfo))
    except psycopg.ProgrammingError:
        raise ShoalError("this does not say how to reach a database: postgresql://user:password@host:5432/database is expected") from None


def explained(problem: psycopg.Error, where: str) -> ShoalError:
    """An error of the database in our words."""
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
