"""Frames in the database: cut into parts that fit a message of PostgreSQL, stored as they are, put together again."""

from __future__ import annotations

import itertools
import struct
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from psycopg.adapt import Buffer, Loader
from psycopg.pq import Format

from shoal.errors import ShoalError
from shoal.protocol.buffer_pool import take_buffer
from shoal.protocol.checksums import crc32
from shoal.transports import wire
from shoal.transports.interface import Frame
from shoal.transports.postgres.reconnecting import Connection

PART_BYTES = 1 << 18
"""Measured over loopback: smaller parts cost statements, larger ones copies."""
WINDOW = 128
"""Parts that are sent before an answer is awaited: bounds what is in memory twice."""
LARGE_BYTES = 1 << 16
"""From this size on, the database is asked whether it accepts the frames before they are uploaded."""
_ROW = struct.Struct(">hi16siii")
_COPY_BEGIN, _COPY_END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"


def cut(frame: Frame) -> Iterator[tuple[int, memoryview]]:
    view = memoryview(wire.flat(frame))
    for n, begin in enumerate(range(0, len(view), PART_BYTES)):
        yield n, view[begin : begin + PART_BYTES]


def upload(connection: Connection, frames: Sequence[Frame]) -> list[uuid.UUID]:
    """Upload frames part by part through a function, which is all that a student's role may call. It happens within a transaction, at whose
    end some row must refer to the frames."""
    ids = [uuid.uuid4() for _ in frames]
    rows = ((blob, n, part) for blob, frame in zip(ids, frames, strict=True) for n, part in cut(frame))
    while window := list(itertools.islice(rows, WINDOW)):
        with connection.pipeline():
            for row in window:
                connection.execute("SELECT shoal.put_part(%b, %b, %b)", row)
    return ids


def copy_in(connection: Connection, table: str, ids: Sequence[uuid.UUID], frames: Sequence[Frame], turn: int = 0, of: int = 1) -> None:
    """Upload frames in one stream, which only the coordinator's role may do; or as stream `turn` of `of`, with every `of`-th part.
    `table`: parts, or published_parts."""
    with connection.cursor().copy(f"COPY shoal.{table} FROM STDIN (FORMAT BINARY)") as stream:
        stream.write(_COPY_BEGIN)
        for owner, frame in zip(ids, frames, strict=True):
            for n, part in cut(frame):
                if n % of == turn:
                    stream.write(_ROW.pack(3, 16, owner.bytes, 4, n, len(part)))
                    stream.write(part)
        stream.write(_COPY_END)


def store(connection: Connection, frames: Sequence[Frame]) -> list[uuid.UUID]:
    """Store frames as blobs with one use each. The caller has a transaction open."""
    ids = [uuid.uuid4() for _ in frames]
    if ids:
        copy_in(connection, "parts", ids, frames)
        connection.cursor().executemany("INSERT INTO shoal.blobs VALUES (%s, %s, 1)", list(zip(ids, sizes(frames), strict=True)))
    return ids


def release(connection: Connection, blobs: Sequence[uuid.UUID]) -> int:
    """Drop one use of each blob; returns the bytes of those that have none left."""
    if not blobs:
        return 0
    row = connection.execute(
        "SELECT coalesce(sum(bytes) FILTER (WHERE uses = 1), 0)::int8, shoal.release_frames(%s) FROM shoal.blobs WHERE id = ANY (%s)",
        (list(blobs), list(blobs)),
    ).fetchone()
    assert row is not None
    return row[0]


def sizes(frames: Sequence[Frame]) -> list[int]:
    return [wire.size_of([frame]) for frame in frames]


class FramedRow(NamedTuple):
    """The result of an SQL function such as `read_reply`: its first row, and its frames."""

    row: tuple[Any, ...]
    frames: tuple[memoryview, ...]
    checksums: tuple[int, ...] = ()
    """CRC-32 of each frame, where they were asked for."""


class _ByteaView(Loader):
    """Passes a bytea on where libpq has it, without a copy."""

    format = Format.BINARY

    def load(self, data: Buffer) -> Buffer:
        return data


def read(connection: Connection, query: str, values: Sequence[Any], checksums: bool = False) -> FramedRow | None:
    """Rows of (frame, sizes, data, …): the first with the frames' sizes, the others with their parts in order. None: no row.

    Rows are taken one by one, so that each part is copied once, into its place, while the next is under way: half the time of fetching all.
    The checksum of a part that was just copied is computed from the processor's cache.
    """
    with connection.cursor() as cursor:
        cursor.adapters.register_loader("bytea", _ByteaView)
        rows = cursor.stream(query.encode(), values, binary=True)
        first = next(rows, None)
        whole = [take_buffer(size) for size in first[1] or ()] if first else []
        left, sums = [*whole], [0] * len(whole)
        for frame, _, data, *_ in rows:
            rest = left[frame - 1]
            if len(data) > len(rest):
                raise ShoalError("a frame in the database is longer than it should be: restore the database from a backup")
            rest[: len(data)] = data
            left[frame - 1] = rest[len(data) :]
            if checksums:
                sums[frame - 1] = crc32(data, sums[frame - 1])
    if any(left):
        raise ShoalError("a frame in the database is shorter than it should be: restore the database from a backup")
    if first is None:
        return None
    row = tuple(bytes(value) if isinstance(value, memoryview) else value for value in first)
    return FramedRow(row, tuple(whole), tuple(sums) if checksums else ())
