"""Repair of a run in a database (`shoal repair`): go back to the last record that is undamaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]

from shoal.protocol.checksums import crc32
from shoal.transports.postgres.server import PostgresServer
from shoal.transports.postgres.store import DamagedDatabaseJournal, PostgresJournal


class SoundRecords(NamedTuple):
    """As far as the records since a snapshot can be trusted."""

    records: list[dict[str, Any]]
    last: int
    """The id of the last of them; that before the first, where there is none."""
    problem: str
    """What comes after that; nothing, if all is well."""


class RemovedRecords(NamedTuple):
    """What was deleted from the database, for people to look at."""

    records: list[dict[str, Any]]
    ledger: list[str]


def sound_since(server: PostgresServer, snapshot: int) -> SoundRecords:
    """Every record since a snapshot, up to the first that cannot be trusted."""
    records, problem = list[dict[str, Any]](), ""
    try:
        for record, _ in PostgresJournal(server).recover(snapshot):
            records.append(record)
    except DamagedDatabaseJournal as error:
        problem = error.what
    rows = server.fetch("SELECT id FROM shoal.records WHERE journal >= %s ORDER BY journal, id", (snapshot,))
    ids = [row[0] for row in rows]
    return SoundRecords(records, ids[len(records) - 1] if records else min(ids, default=1) - 1, problem)


def readable_after(server: PostgresServer, last: int) -> Iterator[dict[str, Any]]:
    """What can be read of the records after one, whatever their checksums say: it is only used to name what is lost."""
    for (content,) in server.fetch("SELECT record FROM shoal.records WHERE id > %s ORDER BY id", (last,)):
        try:
            record = msgpack.unpackb(content)
        except (ValueError, msgpack.exceptions.UnpackException):
            continue
        if isinstance(record, dict) and isinstance(record.get("worker"), str) and isinstance(record.get("seq"), int):
            yield record


def waiting(server: PostgresServer) -> list[tuple[Any, ...]]:
    """Worker and number of results that were confirmed and are in no record yet."""
    return server.fetch("SELECT worker, unit FROM shoal.contributions WHERE kind = 'delivered' ORDER BY seq")


def ledger_since(server: PostgresServer, length: int) -> Iterator[dict[str, Any]]:
    """Lines that the ledger got after a snapshot, and that can be trusted."""
    for entry, checksum in server.fetch("SELECT entry, checksum FROM shoal.ledger WHERE line > %s ORDER BY line", (length,)):
        if crc32(entry.encode()) == checksum:
            yield json.loads(entry)


def go_back(server: PostgresServer, snapshot: int, ledger_lines: int, last: int) -> RemovedRecords:
    """Take out what follows a record: later records, lines of the ledger and snapshots, and all units, which are offered anew. The caller
    has a transaction open."""
    records = server.fetch("DELETE FROM shoal.records WHERE id > %s RETURNING id, journal, record, frames", (last,))
    ledger = server.fetch("DELETE FROM shoal.ledger WHERE line > %s RETURNING line, entry", (ledger_lines,))
    freed = [row[3] for row in records]
    for table, condition in (("snapshots", f"number > {snapshot:d}"), ("contributions", "true")):
        freed += [row[0] for row in server.fetch(f"DELETE FROM shoal.{table} WHERE {condition} RETURNING frames")]
    for table in ("units", "iterations"):
        server.fetch(f"DELETE FROM shoal.{table} RETURNING 1")
    server.release([blob for frames in freed for blob in frames])
    server.fetch("INSERT INTO shoal.journals VALUES (%s) ON CONFLICT DO NOTHING RETURNING 1", (snapshot,))
    removed = [{"id": number, "journal": journal, "record": bytes(content).hex()} for number, journal, content, _ in sorted(records)]
    return RemovedRecords(removed, [entry for _, entry in sorted(ledger)])


def note_repair(server: PostgresServer, snapshot: int, record: dict[str, Any]) -> None:
    """Append a record after those that are sound."""
    journal = PostgresJournal(server)
    for _ in journal.recover(snapshot):
        pass
    journal.append(record)
