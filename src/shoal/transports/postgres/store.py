"""The coordinator's journal, ledger and snapshots in the database, instead of in files.

Records and the ledger are written within the transaction of the event that they belong to, so they never disagree with each other or with
the units. A record whose frames came out of the database refers to them; they are not written again. A snapshot is a transaction of its
own, some time after the journal began that follows it; until then the one before it and both journals are what survives.

Checksums cover what is written, and each record names that of the one before it, so that errors name what is damaged or missing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import msgpack  # type: ignore[import-untyped]
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from shoal.errors import ShoalError
from shoal.files import check_format
from shoal.protocol.checksums import crc32
from shoal.protocol.messages import Frames
from shoal.transports.postgres import frames as blobs
from shoal.transports.postgres.reconnecting import Connection
from shoal.transports.postgres.server import PostgresServer
from shoal.updates.state_packing import Checkpoint, packed, unpacked

_SNAPSHOT_FORMAT = 1


def checksum_of(journal: int, record: bytes, frames: Sequence[int]) -> int:
    """The checksum of a record, with its place and the checksums of its frames. Those are known since the frames arrived, so that closing
    a round, for which workers wait, does not read the numbers of all contributions once more."""
    return crc32(struct.pack(f"<{len(frames)}I", *frames), crc32(record, crc32(f"{journal} {len(record)}".encode())))


class DamagedDatabaseJournal(ShoalError):
    """The journal cannot be read to its end; `what` is wrong with it."""

    def __init__(self, server: PostgresServer, what: str) -> None:
        super().__init__(
            f"the journal in {server.connection.name} is damaged: {what}. Restore the database from a backup; or let `shoal repair RUN`,"
            " with the run's folder, take out what follows the damage, which names what is lost, and resume then"
        )
        self.what = what


class PostgresJournal:
    """The journal: records are appended to it."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._number = 0
        self.open = True
        self.bytes_since_snapshot = self.records_since_snapshot = 0

    def begin(self, pending: Iterable[tuple[dict[str, Any], Frames]] = ()) -> int:
        """Start a journal, with what belongs to rounds that are open; the number of the snapshot that is to follow."""
        with self._server.transaction():
            rows = self._server.fetch("INSERT INTO shoal.journals SELECT coalesce(max(number), 0) + 1 FROM shoal.journals RETURNING number")
            self._number = rows[0][0]
            self.bytes_since_snapshot = self.records_since_snapshot = 0
            self.append_all(pending)
        return self._number

    def append_all(self, records: Iterable[tuple[dict[str, Any], Frames]]) -> None:
        for record, frames in records:
            self.append(record, frames)

    def append(self, record: dict[str, Any], frames: Frames = ()) -> None:
        packed_record: bytes = msgpack.packb(record)
        size = len(packed_record) + sum(blobs.sizes(frames))
        with self._server.transaction():
            self._server.fetch(
                "INSERT INTO shoal.records (journal, record, frames, bytes, checksum, before)"
                " SELECT %b::int8, %b, %b::uuid[], %b::int8, %b::int8, (SELECT r.checksum FROM shoal.records r ORDER BY r.id DESC LIMIT 1)"
                " RETURNING 1",
                (self._number, packed_record, self._server.keep(frames), size, self._checksum(self._number, packed_record, frames)),
            )
        self.records_since_snapshot += 1
        self.bytes_since_snapshot += size

    def recover(self, snapshot: int) -> Iterator[tuple[dict[str, Any], tuple[memoryview, ...]]]:
        """Every record since a snapshot; what follows is appended after the last."""
        numbers = [row[0] for row in self._server.fetch("SELECT number FROM shoal.journals WHERE number >= %s ORDER BY 1", (snapshot,))]
        if numbers[:1] != [snapshot]:
            raise DamagedDatabaseJournal(self._server, f"the journal that follows snapshot {snapshot} is missing")
        rows = self._server.fetch("SELECT id, bytes FROM shoal.records WHERE journal >= %s ORDER BY journal, id", (snapshot,))
        last: int | None = None
        for position, (number, _) in enumerate(rows, 1):
            ((journal, record, ids, checksum, before),) = self._server.fetch(
                "SELECT journal, record, frames, checksum, before FROM shoal.records WHERE id = %s", (number,)
            )
            frames = self._read(ids, position)
            if checksum != self._checksum(journal, record, frames):
                raise self._damaged(f"record {number} of journal {journal} does not match its checksum", position - 1)
            if last is not None and before != last:
                raise self._damaged(f"record {number} of journal {journal} does not follow the one before it", position - 1)
            last = checksum
            yield msgpack.unpackb(record), frames
        self._number = numbers[-1]
        self.records_since_snapshot, self.bytes_since_snapshot = len(rows), sum(size for _, size in rows)

    def _checksum(self, journal: int, record: bytes, frames: Frames) -> int:
        return checksum_of(journal, record, [self._server.known.checksum_of(frame) for frame in frames])

    def _read(self, ids: list[Any], position: int) -> tuple[memoryview, ...]:
        try:
            return self._server.read(ids)
        except (ShoalError, ValueError, IndexError) as error:
            raise self._damaged(f"the frames of record {position} since the snapshot cannot be read ({error})", position - 1) from None

    def _damaged(self, what: str, sound: int) -> DamagedDatabaseJournal:
        return DamagedDatabaseJournal(self._server, f"{what}. The {sound} records before it, since the snapshot, are sound")

    def close(self) -> None:
        """There is nothing to close: each record was written when it was appended."""


class PostgresLedger:
    """One line for each version, and for whatever happened to a contribution besides."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    def append(self, line: dict[str, Any]) -> None:
        entry = json.dumps(line, separators=(",", ":"))
        with self._server.transaction():
            self._server.fetch(
                "INSERT INTO shoal.ledger (line, entry, checksum, record) SELECT coalesce(max(l.line), 0) + 1, %s, %s,"
                " (SELECT r.id FROM shoal.records r ORDER BY r.id DESC LIMIT 1) FROM shoal.ledger l RETURNING 1",
                (entry, crc32(entry.encode())),
            )

    @property
    def length(self) -> int:
        return self._server.fetch("SELECT coalesce(max(line), 0) FROM shoal.ledger")[0][0]

    def cut(self, length: int) -> None:
        """Cut the ledger back to its length at a snapshot; the records since then write the rest again."""
        if self.length < length:
            raise ShoalError(
                f"the ledger in {self._server.connection.name} is shorter than when the snapshot was taken: restore it from a backup"
            )
        self._refuse_lost_end(length)
        with self._server.transaction():
            self._server.fetch("DELETE FROM shoal.ledger WHERE line > %s RETURNING 1", (length,))

    def _refuse_lost_end(self, length: int) -> None:
        """Lines of the ledger know the newest record of their moment: a journal that has lost its end does not have it."""
        query = (
            "SELECT line, record FROM shoal.ledger WHERE line > %s AND record > (SELECT coalesce(max(id), 0) FROM shoal.records)"
            " ORDER BY line LIMIT 1"
        )
        for line, record in self._server.fetch(query, (length,)):
            raise DamagedDatabaseJournal(self._server, f"line {line} of the ledger tells of record {record}, and the records end before it")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for (entry,) in self._server.fetch("SELECT entry FROM shoal.ledger ORDER BY line"):
            yield json.loads(entry)

    def close(self) -> None:
        """There is nothing to close: each line was written when it was appended."""


class PostgresSnapshots:
    """Snapshots of the learner and the coordinator. The newest few are kept."""

    def __init__(self, server: PostgresServer, keep_last: int) -> None:
        self._server = server
        self.folder = PurePosixPath("shoal.snapshots")
        self.keep_last = keep_last

    def copied(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> Callable[[], None]:
        """Copy the present state. The function that is returned writes it from any thread, whole or not at all, and deletes the oldest
        snapshot with the records that only it needs."""
        copies, tensors = {name: value.detach().clone() for name, value in weights.items()}, dict[str, Tensor]()
        plain = packed(state, "", tensors)

        def write() -> None:
            files = [save({name: value.cpu().contiguous() for name, value in each.items()}) for each in (copies, tensors)]
            header = json.dumps({"format": _SNAPSHOT_FORMAT, "step": step, "checksums": [crc32(file) for file in files], "state": plain})
            self._server.freed_elsewhere += self._server.in_own_transaction(lambda connection: self._write(connection, step, header, files))

        return write

    def _write(self, connection: Connection, step: int, header: str, files: list[bytes]) -> int:
        """Write a snapshot and delete old ones; how many bytes were freed. It is harmless to do this twice."""
        if connection.execute("SELECT 1 FROM shoal.snapshots WHERE number = %s", (step,)).fetchone():
            return 0
        ids = blobs.store(connection, files)
        connection.execute(
            "INSERT INTO shoal.snapshots (number, header, frames, checksum) VALUES (%s, %s, %s::uuid[], %s)",
            (step, header, ids, crc32(header.encode())),
        )
        gone = connection.execute(
            "DELETE FROM shoal.snapshots WHERE number NOT IN (SELECT number FROM shoal.snapshots ORDER BY number DESC LIMIT %s)"
            " RETURNING frames",
            (self.keep_last,),
        ).fetchall()
        gone += connection.execute(
            "DELETE FROM shoal.records WHERE journal < (SELECT min(number) FROM shoal.snapshots) RETURNING frames"
        ).fetchall()
        connection.execute("DELETE FROM shoal.journals WHERE number < (SELECT min(number) FROM shoal.snapshots)")
        return blobs.release(connection, [blob for (frames,) in gone for blob in frames])

    def all(self) -> list[PurePosixPath]:
        """The paths of all snapshots, oldest first."""
        return [self._path(row[0]) for row in self._server.fetch("SELECT number FROM shoal.snapshots ORDER BY number")]

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest snapshot that can be read; `warn` is called for each that cannot."""
        for path in reversed(self.all()):
            try:
                return self._read(path)
            except ShoalError as error:
                warn(f"{error}; trying the one before it")
        return None

    def _read(self, path: PurePosixPath) -> Checkpoint:
        ((text, ids, checksum),) = self._server.fetch(
            "SELECT header, frames, checksum FROM shoal.snapshots WHERE number = %s", (int(path.name.partition("-")[2]),)
        )
        if crc32(text.encode()) != checksum:
            raise ShoalError(f"snapshot {path} is damaged: its state does not match its checksum")
        try:
            header = json.loads(text)
            check_format(path, "snapshot", header["format"], _SNAPSHOT_FORMAT)
            files = [bytes(file) for file in self._server.read(ids)]
            if [crc32(file) for file in files] != header["checksums"]:
                raise ShoalError(f"snapshot {path} is damaged: it does not match its checksums")
            weights, tensors = map(load, files)
            return Checkpoint(path, header["step"], weights, unpacked(header["state"], tensors))
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ShoalError(f"snapshot {path} cannot be read: {error}") from None

    def _path(self, step: int) -> PurePosixPath:
        return self.folder / f"step-{step:08d}"


class PostgresStore:
    """Journal, ledger and snapshots in one server's transactions."""

    transactional = True
    receipt_key = b""
    """Units are confirmed by the database itself, which has no seal."""

    def __init__(self, server: PostgresServer) -> None:
        self.journal, self.ledger, self.snapshots = PostgresJournal(server), PostgresLedger(server), PostgresSnapshots(server, 2)
        self.carry_out = server.carry_out

    def settle(self) -> list[str]:
        """Nothing to compare: records and lines are written in the same transactions."""
        return []

    def forget(self) -> None:
        """Nothing to do: writing a snapshot deletes the records that only older ones needed."""
