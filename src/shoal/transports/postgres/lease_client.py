"""The worker's side of units on lease: claim units, read weights, submit results. It needs the database, and no running coordinator.

A lease is a random secret that the worker makes when it claims; only its holder can submit the unit's result. Every call may be repeated
after a lost connection: the same lease gets the same units, and the same result is accepted once. The SQL functions are in
`migrations/001/leases.sql`.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.transports import wire
from shoal.transports.interface import Frame, Message, Unreachable
from shoal.transports.postgres import frames as blobs
from shoal.transports.postgres import schema
from shoal.transports.postgres.reconnecting import Connection, ReconnectingConnection

_LIMITS = wire.Limits(1 << 40)
_RECLAIM_EVERY_S = 1.0
"""While there is other work, expired leases of other workers are requeued this often."""


class ClaimedUnit(NamedTuple):
    """A range of batches of an epoch's order, on lease."""

    id: int
    lease: uuid.UUID
    iteration: int
    epoch: int
    start: int
    batches: int
    attempts: int


class PublishedWeights(NamedTuple):
    """A published version of the weights: in full, or the difference from the one before."""

    version: int
    kind: str
    header: dict[str, Any]
    frames: tuple[memoryview, ...]


class LeaseClient:
    """`heartbeat` belongs to a thread of its own, `wake` and `close` to any; the rest to one."""

    def __init__(
        self, conninfo: str, *, poll_interval_s: float, patience_s: float = 60.0, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """`patience_s`: how long a lost connection is tried again before Unreachable; `warn` is called meanwhile."""
        self.poll_interval_s = poll_interval_s
        self.patience_s = patience_s
        self._secret = uuid.uuid4()
        # Where the run was stopped, its database goes, too
        self._connection = ReconnectingConnection(conninfo, ["shoal_work"], lambda text: None if self.end else warn(text))
        self._heartbeats = ReconnectingConnection(conninfo)
        self._working, self._beating = threading.RLock(), threading.RLock()
        self._woken = threading.Event()
        self._after = 0
        self._notifications = 0
        self._reclaimed_at = -math.inf
        self.asks_for_lease = False
        """Whether `is_lease_valid` waits for the database. Any thread may read this."""
        self.end = ""
        """How the run has ended or was stopped, as far as this client knows; empty: it goes on."""

    def read_run(self, wait_s: float = 0.0) -> Message:
        """The run's description. Raises ShoalError where there is none after `wait_s`."""
        deadline, waits = time.monotonic() + wait_s, False
        with self._working:
            self._connection.run(schema.check, self.patience_s)
            while (answer := self._read("SELECT frame, sizes, data, header FROM shoal.read_run() ORDER BY frame, n", ())) is None:
                if not waits and wait_s:
                    self._connection.warn(f"{self._connection.name} holds no run yet: waiting for the coordinator")
                waits = True
                if (left := deadline - time.monotonic()) <= 0 or self._woken.is_set():
                    raise ShoalError(f"{self._connection.name} holds no run yet: start the coordinator, then join again")
                self._connection.wait(min(left, self.poll_interval_s))
        return Message(_decoded(answer.row[3]), answer.frames)

    def join(self, name: str | None, about: Mapping[str, str]) -> str:
        """Join the run; returns the worker's name. A name whose worker left or died is taken over, one in use gets a number behind it."""
        return str(self._ask("SELECT shoal.join_run(%b, %t, %t)", (self._secret, name, json.dumps(dict(about))))[0][0])

    def heartbeat(self, state: str, figures: Mapping[str, float]) -> None:
        """Send a heartbeat over a connection of its own, without trying again: the next one comes soon."""
        finite = {key: value for key, value in figures.items() if math.isfinite(value)}
        with self._beating:
            self._heartbeats.run_once(
                lambda connection: connection.execute("SELECT shoal.heartbeat(%b, %t, %t)", (self._secret, state, json.dumps(finite)))
            )

    def is_answered(self) -> bool:
        """Whether the database answers, over a new connection: the others may be stuck."""
        self._heartbeats.abort()
        try:
            self.heartbeat("leaving", {})
        except Unreachable:
            return False
        return True

    def claim(self, count: int, timeout_s: float) -> list[ClaimedUnit]:
        """Up to `count` units, as soon as there is one. An empty list after the timeout, `wake`, or a notification of something else: read
        the weights then, and claim again."""
        with self._working:
            units, due_s = self._try_to_claim(count)
            if not units and timeout_s > 0 and not self._woken.is_set():
                self._connection.wait(min(timeout_s, self.poll_interval_s, max(0.01, due_s)))
                units, _ = self._try_to_claim(count)
            self._woken.clear()
            return units

    def _try_to_claim(self, count: int) -> tuple[list[ClaimedUnit], float]:
        lease, attempts = uuid.uuid4(), 0
        reclaim = time.monotonic() - self._reclaimed_at > _RECLAIM_EVERY_S

        def claim(connection: Connection) -> list[tuple[Any, ...]]:
            nonlocal attempts
            attempts += 1
            query = (
                "SELECT id, iteration, epoch, start, batches, attempts, queue_position, due_s"
                " FROM shoal.claim(%b, %b, %b::int4, %b::int8, %b, %b)"
            )
            return connection.execute(query, (self._secret, lease, count, self._after, reclaim, attempts > 1), binary=True).fetchall()

        rows = self._connection.run(claim, self.patience_s)
        if reclaim:
            self._reclaimed_at = time.monotonic()
        if rows[0][0] is None:
            self._after = 0
            return [], math.inf if rows[0][7] is None else rows[0][7]
        self._after = max(row[6] for row in rows)
        return [ClaimedUnit(row[0], lease, *row[1:6]) for row in sorted(rows, key=lambda row: row[6])], 0.0

    def read_piece(self, number: int) -> bytes | None:
        """A piece of the data set, if the coordinator put it into the database."""
        return self._ask("SELECT shoal.read_piece(%b::int4)", (number,))[0][0]

    def why_no_work(self) -> str | None:
        """Why this student gets no work, and for how long; None if it may have some."""
        return self._ask("SELECT shoal.why_no_work()", ())[0][0]

    def read_end(self) -> None:
        """Read how the run has ended or was stopped."""
        self.end = self._ask("SELECT shoal.run_end()", ())[0][0] or ""

    def weights(self, have: int) -> PublishedWeights | None:
        """Weights newer than the version `have`: the difference to the next one, else the newest in full; None if there are none."""
        query = "SELECT frame, sizes, data, header, version, kind FROM shoal.read_weights(%b::int8) ORDER BY frame, n"
        answer = self._read(query, (have,))
        return PublishedWeights(answer.row[4], answer.row[5], _decoded(answer.row[3]), answer.frames) if answer else None

    def submit(self, unit: ClaimedUnit, header: dict[str, Any], frames: Sequence[Frame]) -> str:
        """Submit a unit's result; returns `accepted`, or `cancelled` or `late` if it was dropped."""
        packed, *content = wire.encode(Message(header, tuple(frames)), 0, _LIMITS)

        def submit(connection: Connection) -> str:
            with connection.transaction():
                is_valid = self._is_worth_uploading(connection, unit, content)
                ids = blobs.upload(connection, content) if is_valid else []
                row = connection.execute(
                    "SELECT shoal.submit(%b, %b::int8, %b, %b::int8, %b, %b::uuid[], %b::int8[], %b)",
                    (self._secret, unit.id, unit.lease, unit.iteration, packed, ids, blobs.sizes(content), not is_valid),
                ).fetchone()
            assert row is not None
            return row[0]

        with self._working:
            return self._connection.run(submit, self.patience_s)

    def _is_worth_uploading(self, connection: Connection, unit: ClaimedUnit, content: Sequence[Frame]) -> bool:
        """Whether the lease is still valid. Asked only for large results, whose upload would cost more than the question."""
        if wire.size_of(content) < blobs.LARGE_BYTES:
            return True
        row = connection.execute("SELECT shoal.is_lease_valid(%b::int8, %b)", (unit.id, unit.lease)).fetchone()
        return bool(row and row[0])

    def is_lease_valid(self, unit: ClaimedUnit) -> bool:
        """Whether the lease is still valid. The database is asked only after a notification, and once: while it does not answer, the
        lease counts as valid, and `submit` finds out."""

        def ask(connection: Connection) -> tuple[Any, ...]:
            query = "SELECT shoal.is_lease_valid(%b::int8, %b), shoal.run_end()"
            return connection.execute(query, (unit.id, unit.lease), binary=True).fetchall()[0]

        with self._working:
            notifications = self._connection.notification_count()
            if notifications == self._notifications:
                return True
            self.asks_for_lease = True
            try:
                is_valid, end = self._connection.run_once(ask)
            except Unreachable:
                return True
            finally:
                self.asks_for_lease = False
            self._notifications, self.end = notifications, end or ""
            return bool(is_valid)

    def return_unit(self, unit: ClaimedUnit) -> None:
        """Return a unit, so that another worker may do it. This does not count as an attempt."""
        self._ask("SELECT shoal.return_unit(%b, %b::int8, %b)", (self._secret, unit.id, unit.lease))

    def fail_unit(self, unit: ClaimedUnit, reason: str) -> None:
        """Report that a unit failed here. Another worker tries it, unless its attempts are used up."""
        self._ask("SELECT shoal.fail_unit(%b, %b::int8, %b, %t)", (self._secret, unit.id, unit.lease, reason))

    def leave(self) -> None:
        """Return all leases and leave the run."""
        self._ask("SELECT shoal.leave_run(%b)", (self._secret,))

    def leave_beside(self) -> None:
        """Leave over the connection of the heartbeats, while another thread uses the other one."""
        with self._beating:
            self._heartbeats.run_once(lambda connection: connection.execute("SELECT shoal.leave_run(%b)", (self._secret,)))

    def _ask(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._working:
            return self._connection.run(
                lambda connection: connection.execute(query.encode(), values, binary=True).fetchall(), self.patience_s
            )

    def _read(self, query: str, values: tuple[Any, ...]) -> blobs.FramedRow | None:
        with self._working:
            return self._connection.run(lambda connection: blobs.read(connection, query, values), self.patience_s)

    def wake(self) -> None:
        """End a `claim` that waits, or else the next one."""
        self._woken.set()
        self._connection.wake()

    def close(self) -> None:
        self._connection.close_shared(self._working)
        self._heartbeats.close_shared(self._beating)


def stored_run(conninfo: str) -> Message:
    """The description of the run that a database holds. Raises ShoalError where there is none."""
    with contextlib.closing(LeaseClient(conninfo, poll_interval_s=1.0, patience_s=0.0)) as client:
        return client.read_run()


def _decoded(header: bytes) -> dict[str, Any]:
    return wire.decode([header], _LIMITS)[1].header
