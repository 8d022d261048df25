"""Frames in the database: cut into parts that fit a message of PostgreSQL, stored as they are, put together again."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shoal.transports import wire
from shoal.transports.interface import Frame
from shoal.transports.postgres.line import Connection

PART_BYTES = 1 << 20
"""Measured over loopback: smaller parts cost statements, larger ones copies."""
WINDOW = 32
"""Parts under way before an answer is waited for: bounds what is in memory twice."""
_ROW = struct.Struct(">hi16siii")
_COPY_BEGIN, _COPY_END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"


def cut(frame: Frame) -> Iterator[tuple[int, memoryview]]:
    view = memoryview(wire.flat(frame))
    for n, begin in enumerate(range(0, len(view), PART_BYTES)):
        yield n, view[begin : begin + PART_BYTES]


def upload(connection: Connection, frames: Sequence[Frame]) -> list[uuid.UUID]:
    """As a student may: part by part, through a function. Within a transaction, at whose end somebody must own them."""
    ids = [uuid.uuid4() for _ in frames]
    for window in _windows((blob, n, part) for blob, frame in zip(ids, frames, strict=True) for n, part in cut(frame)):
        with connection.pipeline():
            for row in window:
                connection.execute("SELECT shoal.put_part(%b, %b, %b)", row)
    return ids


def copy_in(connection: Connection, table: str, ids: Sequence[uuid.UUID], frames: Sequence[Frame]) -> None:
    """As the coordinator may: in one stream. `table`: parts, or flyer_parts."""
    with connection.cursor().copy(f"COPY shoal.{table} FROM STDIN (FORMAT BINARY)") as stream:
        stream.write(_COPY_BEGIN)
        for owner, frame in zip(ids, frames, strict=True):
            for n, part in cut(frame):
                stream.write(_ROW.pack(3, 16, owner.bytes, 4, n, len(part)))
                stream.write(part)
        stream.write(_COPY_END)


def sizes(frames: Sequence[Frame]) -> list[int]:
    return [wire.size_of([frame]) for frame in frames]


def joined(count: int, rows: Iterable[tuple[int, int, bytes]]) -> tuple[bytes, ...]:
    """Frames from rows of (frame counted from 1, part, bytes), in any order."""
    parts: list[list[bytes]] = [[] for _ in range(count)]
    for frame, _, data in sorted(rows, key=lambda row: row[:2]):
        parts[frame - 1].append(data)
    return tuple(each[0] if len(each) == 1 else b"".join(each) for each in parts)


def told(rows: Sequence[tuple[Any, ...]]) -> tuple[bytes, tuple[bytes, ...]]:
    """Header and frames from rows as the functions `answer`, `welcome` and `read_weights` return them."""
    first = next(row for row in rows if row[0] == 0)
    return first[2], joined(first[1], ((row[0], row[1], row[3]) for row in rows if row[0] > 0))


def _windows(rows: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    window: list[tuple[Any, ...]] = []
    for row in rows:
        window.append(row)
        if len(window) == WINDOW:
            yield window
            window = []
    if window:
        yield window
