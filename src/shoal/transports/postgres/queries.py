"""Read-only queries about a run: its progress for the reader's role, its records for an audit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from psycopg.rows import dict_row

from shoal.transports.postgres.reconnecting import Connection


class RunView(NamedTuple):
    """A run at one moment."""

    now: datetime
    iteration: int | None
    coordinator_seen_at: datetime | None
    facts: dict[str, Any]
    units: dict[str, int]
    workers: list[dict[str, Any]]
    figures: dict[str, float]
    """The newest of each kind."""
    picture: tuple[int, datetime] | None
    """Step and time of the newest grid."""


def look(connection: Connection) -> RunView | None:
    """The run, if there is one. All of it is of the same moment."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        progress = connection.execute("SELECT now(), iteration, nullif(coordinator_seen_at, '-infinity') FROM shoal.progress").fetchone()
        if progress is None:
            return None
        return RunView(
            now=progress[0],
            iteration=progress[1],
            coordinator_seen_at=progress[2],
            facts=dict(connection.execute("SELECT name, value FROM shoal.facts").fetchall()),
            units=dict(connection.execute("SELECT state, units FROM shoal.unit_counts").fetchall()),
            workers=workers(connection),
            figures=_newest(connection.execute("SELECT figures FROM shoal.metrics ORDER BY id DESC LIMIT 50").fetchall()),
            picture=connection.execute("SELECT step, at FROM shoal.picture").fetchone(),
        )


def picture(connection: Connection) -> bytes | None:
    """The newest grid of samples, as a PNG."""
    row = connection.execute("SELECT png FROM shoal.picture").fetchone()
    return bytes(row[0]) if row else None


class AuditTrail(NamedTuple):
    """What a run has left behind in the database, for an audit."""

    ledger: list[str]
    snapshot: dict[str, Any] | None
    """What the newest one says of itself."""
    records: list[bytes]
    """Of all journals since the snapshot, each as it was packed."""
    waiting: list[tuple[str, int]]
    """Results that were confirmed and that no coordinator has taken yet: worker and unit."""


def trail(connection: Connection) -> AuditTrail:
    """All of the same moment. It needs a role that may read the coordinator's tables."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        ledger = [row[0] for row in connection.execute("SELECT entry FROM shoal.ledger ORDER BY line").fetchall()]
        newest = connection.execute("SELECT number, header FROM shoal.snapshots ORDER BY number DESC LIMIT 1").fetchone()
        if newest is None:
            return AuditTrail(ledger, None, [], [])
        records = connection.execute("SELECT record FROM shoal.records WHERE journal >= %s ORDER BY journal, id", (newest[0],)).fetchall()
        waiting = connection.execute("SELECT worker, unit FROM shoal.contributions WHERE kind = 'delivered'").fetchall()
        return AuditTrail(ledger, json.loads(newest[1]), [bytes(row[0]) for row in records], [(row[0], row[1]) for row in waiting])


def damage(connection: Connection) -> list[str]:
    """What does not match its checksum, and which records are missing, by name. Frames are not read: the coordinator checks them when it
    comes back."""
    lines = connection.execute("SELECT line, entry, checksum FROM shoal.ledger ORDER BY line").fetchall()
    found = [f"line {line} of the ledger does not match its checksum" for line, entry, own in lines if zlib.crc32(entry.encode()) != own]
    saved = connection.execute("SELECT number, header, checksum FROM shoal.snapshots ORDER BY number").fetchall()
    found += [f"snapshot {number} does not match its checksum" for number, header, own in saved if zlib.crc32(header.encode()) != own]
    query = (
        "SELECT id FROM (SELECT id, before, lag(checksum) OVER (ORDER BY id) AS last FROM shoal.records) r"
        " WHERE last IS NOT NULL AND before IS DISTINCT FROM last ORDER BY id"
    )
    return found + [f"record {number} does not follow the one before it" for (number,) in connection.execute(query).fetchall()]


def workers(connection: Connection) -> list[dict[str, Any]]:
    """All workers that ever took part, with the numbers of their units by outcome."""
    columns = "name, about, state, figures, joined_at, seen_at, left_at, alive, completed, late, cancelled, failed"
    return connection.cursor(row_factory=dict_row).execute(f"SELECT {columns} FROM shoal.worker_list ORDER BY id").fetchall()


def _newest(rows: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for (row,) in reversed(rows):
        figures |= row
    return figures
