"""The worker's side of the board: lease units, read weights, hand in results. It needs the database, not a coordinator that is there.

A unit's lease is a secret that the worker made up when it claimed; nobody else can hand in its result. Everything may be done again after a
connection was lost: the same lease brings the same units, and the same result is taken once.
"""

from __future__ import annotations

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
_LOOK_EVERY_S = 1.0
"""While there is other work, expired leases of other workers are looked for this often."""


class LeasedUnit(NamedTuple):
    """Some batches of an epoch's order, on lease."""

    id: int
    lease: uuid.UUID
    iteration: int
    epoch: int
    start: int
    batches: int
    attempts: int


class PublishedWeights(NamedTuple):
    """A published version: all of it, or what changed since the one before."""

    version: int
    kind: str
    header: dict[str, Any]
    frames: tuple[memoryview, ...]


class LeaseClient:
    """`beat` belongs to a thread of its own, `wake` and `close` to any; the rest to one."""

    def __init__(
        self, conninfo: str, *, poll_interval_s: float, patience_s: float = 60.0, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        """`patience_s`: how long a lost connection is tried again before Unreachable; `tell` hears of it meanwhile."""
        self.poll_interval_s = poll_interval_s
        self.patience_s = patience_s
        self._secret = uuid.uuid4()
        self._line = ReconnectingConnection(conninfo, ["shoal_work"], tell)
        self._pulse = ReconnectingConnection(conninfo)
        self._working, self._beating = threading.RLock(), threading.RLock()
        self._woken = threading.Event()
        self._after = 0
        self._news = 0
        self._looked_at = -math.inf

    def welcome(self, wait_s: float = 0.0) -> Message:
        """The run's description. Raises ShoalError where there is none after `wait_s`."""
        deadline, waits = time.monotonic() + wait_s, False
        with self._working:
            self._line.run(schema.check, self.patience_s)
            while (answer := self._read("SELECT frame, sizes, data, header FROM shoal.read_run() ORDER BY frame, n", ())) is None:
                if not waits and wait_s:
                    self._line.tell(f"{self._line.place} holds no run yet: waiting for the coordinator")
                waits = True
                if (left := deadline - time.monotonic()) <= 0 or self._woken.is_set():
                    raise ShoalError(f"{self._line.place} holds no run yet: start the coordinator, then join again")
                self._line.wait(min(left, self.poll_interval_s))
        return Message(_opened(answer.row[3]), answer.frames)

    def enter(self, name: str | None, about: Mapping[str, str]) -> str:
        """Take part; the name to go by. One whose owner left or died is taken over, one that is in use gets a number behind it."""
        entered: str = self._ask("SELECT shoal.join_run(%b, %t, %t)", (self._secret, name, json.dumps(dict(about))))[0][0]
        return entered

    def beat(self, state: str, figures: Mapping[str, float]) -> None:
        """A sign of life, over a connection of its own. Tried once: the next one comes soon."""
        finite = {key: value for key, value in figures.items() if math.isfinite(value)}
        with self._beating:
            self._pulse.once(lambda line: line.execute("SELECT shoal.heartbeat(%b, %t, %t)", (self._secret, state, json.dumps(finite))))

    def is_answered(self) -> bool:
        """Whether the database gives a sign of life, over a connection that is made for it: the others may be stuck."""
        self._pulse.tear()
        try:
            self.beat("leaving", {})
        except Unreachable:
            return False
        return True

    def claim(self, count: int, timeout_s: float) -> list[LeasedUnit]:
        """Up to `count` units, as soon as there is one. None after the timeout, when woken, or when there is other news: look at
        the weights then, and claim again."""
        with self._working:
            units, due_s = self._try_to_claim(count)
            if not units and timeout_s > 0 and not self._woken.is_set():
                self._line.wait(min(timeout_s, self.poll_interval_s, max(0.01, due_s)))
                units, _ = self._try_to_claim(count)
            self._woken.clear()
            return units

    def _try_to_claim(self, count: int) -> tuple[list[LeasedUnit], float]:
        lease, attempts = uuid.uuid4(), 0
        look = time.monotonic() - self._looked_at > _LOOK_EVERY_S

        def claim(connection: Connection) -> list[tuple[Any, ...]]:
            nonlocal attempts
            attempts += 1
            query = (
                "SELECT id, iteration, epoch, start, batches, attempts, queue_position, due_s"
                " FROM shoal.claim(%b, %b, %b::int4, %b::int8, %b, %b)"
            )
            return connection.execute(query, (self._secret, lease, count, self._after, look, attempts > 1), binary=True).fetchall()

        rows = self._line.run(claim, self.patience_s)
        if look:
            self._looked_at = time.monotonic()
        if rows[0][0] is None:
            self._after = 0
            return [], math.inf if rows[0][7] is None else rows[0][7]
        self._after = max(row[6] for row in rows)
        return [LeasedUnit(row[0], lease, *row[1:6]) for row in sorted(rows, key=lambda row: row[6])], 0.0

    def piece(self, number: int) -> bytes | None:
        """A piece of the data set, where the coordinator put it there."""
        found: bytes | None = self._ask("SELECT shoal.read_piece(%b::int4)", (number,))[0][0]
        return found

    def notice(self) -> str | None:
        """What a student should know who gets no work: why, and for how long."""
        told: str | None = self._ask("SELECT shoal.why_no_work()", ())[0][0]
        return told

    def weights(self, have: int) -> PublishedWeights | None:
        """What leads from the version `have` towards the newest: the difference to the next, else all of the newest; None: it has that."""
        query = "SELECT frame, sizes, data, header, version, kind FROM shoal.read_weights(%b::int8) ORDER BY frame, n"
        answer = self._read(query, (have,))
        return PublishedWeights(answer.row[4], answer.row[5], _opened(answer.row[3]), answer.frames) if answer else None

    def submit(self, unit: LeasedUnit, header: dict[str, Any], frames: Sequence[Frame]) -> str:
        """Hand in a unit's result: `accepted`; or `cancelled`, `late`: dropped, and counted."""
        packed, *content = wire.encode(Message(header, tuple(frames)), 0, _LIMITS)

        def hand_in(connection: Connection) -> str:
            with connection.transaction():
                wanted = self._wanted(connection, unit, content)
                ids = blobs.upload(connection, content) if wanted else []
                row = connection.execute(
                    "SELECT shoal.submit(%b, %b::int8, %b, %b::int8, %b, %b::uuid[], %b::int8[], %b)",
                    (self._secret, unit.id, unit.lease, unit.iteration, packed, ids, blobs.sizes(content), not wanted),
                ).fetchone()
            assert row is not None
            outcome: str = row[0]
            return outcome

        with self._working:
            return self._line.run(hand_in, self.patience_s)

    def _wanted(self, connection: Connection, unit: LeasedUnit, content: Sequence[Frame]) -> bool:
        """Whether the lease is still held, so that much is not uploaded in vain."""
        if wire.size_of(content) < blobs.LARGE_BYTES:
            return True
        row = connection.execute("SELECT shoal.is_lease_valid(%b::int8, %b)", (unit.id, unit.lease)).fetchone()
        return bool(row and row[0])

    def wanted(self, unit: LeasedUnit) -> bool:
        """Whether the lease still holds. The database is asked only after a notification."""
        with self._working:
            news = self._line.listen()
            if news == self._news:
                return True
            self._news = news
            return bool(self._ask("SELECT shoal.is_lease_valid(%b::int8, %b)", (unit.id, unit.lease))[0][0])

    def give_back(self, unit: LeasedUnit) -> None:
        """Give a unit back, so that another worker may do it. This does not count as an attempt."""
        self._ask("SELECT shoal.return_unit(%b, %b::int8, %b)", (self._secret, unit.id, unit.lease))

    def fail(self, unit: LeasedUnit, reason: str) -> None:
        """Report that a unit failed here. Another worker tries it, unless too many have."""
        self._ask("SELECT shoal.fail_unit(%b, %b::int8, %b, %t)", (self._secret, unit.id, unit.lease, reason))

    def leave(self) -> None:
        """Give back all leases, and leave the run."""
        self._ask("SELECT shoal.leave_run(%b)", (self._secret,))

    def _ask(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._working:
            return self._line.run(lambda connection: connection.execute(query.encode(), values, binary=True).fetchall(), self.patience_s)

    def _read(self, query: str, values: tuple[Any, ...]) -> blobs.FramedRow | None:
        with self._working:
            return self._line.run(lambda connection: blobs.read(connection, query, values), self.patience_s)

    def wake(self) -> None:
        """End a `claim` that waits, or the next one."""
        self._woken.set()
        self._line.ring()

    def close(self) -> None:
        for line, lock in ((self._line, self._working), (self._pulse, self._beating)):
            if line.hung_up.is_set():
                continue
            line.hang_up()
            with line.alone(lock):
                line.close()


def stored_run(conninfo: str) -> Message:
    """The description of the run that a database holds. Raises ShoalError where there is none."""
    desk = LeaseClient(conninfo, poll_interval_s=1.0, patience_s=0.0)
    try:
        return desk.welcome()
    finally:
        desk.close()


def _opened(header: bytes) -> dict[str, Any]:
    return wire.decode([header], _LIMITS)[1].header
