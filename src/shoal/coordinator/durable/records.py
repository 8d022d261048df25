"""How records lie in the file of a journal, and how they are read back.

    head      magic, mark, checksum and length of the journal before, checksum of the head
    record    length of header and frames, checksum of the record before; header; frames; checksum of all that; mark

A file may have been written over an older journal: the mark, which nobody can guess, tells a journal's records from what is left of older
ones. A checksum covers every byte of a record and the checksum before it, so records are a chain, and each journal names the end of the one
before it.

What a crash cut off has no mark after it. A record that does not match its checksum, with a mark of this journal anywhere after it, was
whole once: that is damage, and never dropped in silence. Journals of earlier versions begin with their mark, have checksums over headers
only, and no chain; they are read, and called unchecked.
"""

from __future__ import annotations

import mmap
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack  # type: ignore[import-untyped]

from shoal.coordinator.effects import Frames
from shoal.errors import ShoalError
from shoal.protocol.checksums import crc32

MAGIC = b"SHOALJ2\n"
MARK_BYTES = 8
_HEAD = struct.Struct("<8s8sIQ")
_SUM = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _SUM.size
_PREFIX = struct.Struct("<IQI")
"""Bytes of the header, bytes of the frames, checksum of the record before."""
_OLD_PREFIX = struct.Struct("<IIQ")
"""Bytes and checksum of the header, bytes of the frames."""


class RecordEnd(NamedTuple):
    """The end of a record, or of a head: how long the file is up to there, and the checksum there."""

    length: int
    checksum: int


NOWHERE = RecordEnd(0, 0)
"""It is not known where the journal before ended, or there is none."""


class JournalHead(NamedTuple):
    """How a journal begins."""

    mark: bytes
    before: RecordEnd
    begins: RecordEnd
    checked: bool
    """Whether all of its records have checksums."""


class DamagedJournal(ShoalError):
    """A journal cannot be read to its end, and the end was there once."""

    def __init__(self, path: Path, sound: RecordEnd, number: int, what: str) -> None:
        super().__init__(
            f"{path} is damaged: {what}. The {number} records before are sound ({sound.length} bytes). Put the file back from a backup; "
            f"or let `shoal repair {path.parent}` set aside what follows the damage, which names what is lost, and resume then"
        )
        self.path, self.sound, self.number = path, sound, number


def new_head(before: RecordEnd) -> tuple[bytes, JournalHead]:
    """The bytes that a new journal begins with, and what they say."""
    mark = secrets.token_bytes(MARK_BYTES)
    content = _HEAD.pack(MAGIC, mark, before.checksum, before.length)
    checksum = crc32(content)
    return content + _SUM.pack(checksum), JournalHead(mark, before, RecordEnd(HEAD_BYTES, checksum), True)


def parts_of(record: dict[str, Any], frames: Frames, head: JournalHead, after: RecordEnd) -> tuple[list[bytes | memoryview], RecordEnd]:
    """The bytes of a record that follows what ends at `after`, and where it ends itself."""
    header: bytes = msgpack.packb({"record": record, "frames": [len(frame) for frame in frames]})
    body = sum(len(frame) for frame in frames)
    begin = _PREFIX.pack(len(header), body, after.checksum) + header
    checksum = crc32(begin, crc32(head.mark))
    for frame in frames:
        checksum = crc32(frame, checksum)
    end = RecordEnd(after.length + len(begin) + body + _SUM.size + MARK_BYTES, checksum)
    return [begin, *frames, _SUM.pack(checksum) + head.mark], end


def head_of(path: Path) -> JournalHead | None:
    """How a journal begins; None: it was cut off before its first record. Raises Damaged."""
    with path.open("rb") as file:
        content = file.read(HEAD_BYTES)
    if len(content) < MARK_BYTES or (len(content) < HEAD_BYTES and content.startswith(MAGIC)):
        return None
    if len(content) == HEAD_BYTES:
        _, mark, checksum, length = _HEAD.unpack_from(content)
        (own,) = _SUM.unpack_from(content, _HEAD.size)
        if crc32(MAGIC + content[len(MAGIC) : _HEAD.size]) == own:  # also where the magic itself was damaged
            return JournalHead(mark, RecordEnd(length, checksum), RecordEnd(HEAD_BYTES, own), True)
    if content.startswith(MAGIC):
        raise DamagedJournal(path, NOWHERE, 0, "its head does not match its checksum")
    return JournalHead(content[:MARK_BYTES], NOWHERE, RecordEnd(MARK_BYTES, 0), False)


class JournalReader:
    """One pass through a journal. Afterwards `end` is the end of its last whole record, and `records` how many there are."""

    def __init__(self, path: Path) -> None:
        self.path, self.head, self.records = path, head_of(path), 0
        self.end = self.head.begins if self.head is not None else NOWHERE

    def __iter__(self) -> Iterator[tuple[dict[str, Any], tuple[bytes, ...]]]:
        """Whole records with their frames, in order. What a crash cut off is not one. Raises Damaged."""
        if self.head is None:
            return
        with self.path.open("rb") as file:
            total = file.seek(0, 2)
            while (found := self._next(file, total, self.head)) is not None:
                record, frames, self.end = found
                self.records += 1
                yield record, frames
            self._refuse_damage(file, total, self.head)

    def _next(self, file: BinaryIO, total: int, head: JournalHead) -> tuple[dict[str, Any], tuple[bytes, ...], RecordEnd] | None:
        """The record after `end`; None where no whole one stands there."""
        file.seek(self.end.length)
        found = _whole(file, total, head) if head.checked else _whole_unchecked(file, total, head)
        if found is None or (head.checked and found.before != self.end.checksum):
            return None
        return found.record, found.frames, RecordEnd(file.tell(), found.checksum)

    def _refuse_damage(self, file: BinaryIO, total: int, head: JournalHead) -> None:
        if total <= self.end.length:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(head.mark, self.end.length)
        if at >= 0:
            what = "does not match its checksum or does not follow the one before" if head.checked else "cannot be read"
            raise DamagedJournal(self.path, self.end, self.records, f"record {self.records + 1} {what}")


def readable_after(path: Path, length: int) -> Iterator[dict[str, Any]]:
    """Records after so many bytes of a journal that are whole by themselves, whatever stands between them."""
    try:
        head = head_of(path)
    except DamagedJournal:
        head = None
    if head is None:
        return
    whole = _whole if head.checked else _whole_unchecked
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = max(length, head.begins.length) - MARK_BYTES
        while at >= 0:
            file.seek(at + MARK_BYTES)
            found = whole(file, len(content), head)
            if found is not None:
                yield found.record
            at = content.find(head.mark, at + 1)


def follows(before: JournalReader, head: JournalHead | None) -> bool:
    """Whether a journal begins where the one before it, which was read to its end, ends."""
    if head is None or head.before == NOWHERE:  # it was cut off at its very beginning, or is of an earlier version
        return before.head is None or before.head.checked or before.end.length == before.path.stat().st_size
    return before.end == head.before


class _Whole(NamedTuple):
    """A record that is as it was written."""

    record: dict[str, Any]
    frames: tuple[bytes, ...]
    before: int
    checksum: int


def _whole(file: BinaryIO, total: int, head: JournalHead) -> _Whole | None:
    """The record where the file stands. Its mark is not looked at: the checksum says that everything before it is right."""
    begins, prefix = file.tell(), file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    size, body, before = _PREFIX.unpack(prefix)
    if begins + _PREFIX.size + size + body + _SUM.size > total:
        return None
    header = file.read(size)
    checksum = crc32(header, crc32(prefix, crc32(head.mark)))
    fields = _fields(header, body)
    if fields is None:
        return None
    frames = tuple(file.read(length) for length in fields["frames"])
    for frame in frames:
        checksum = crc32(frame, checksum)
    if _SUM.unpack(file.read(_SUM.size))[0] != checksum:
        return None
    file.seek(MARK_BYTES, 1)
    return _Whole(fields["record"], frames, before, checksum)


def _whole_unchecked(file: BinaryIO, total: int, head: JournalHead) -> _Whole | None:
    """The same in a journal of an earlier version: there the mark tells whether a record was written to its end."""
    begins, prefix = file.tell(), file.read(_OLD_PREFIX.size)
    if len(prefix) < _OLD_PREFIX.size:
        return None
    size, checksum, body = _OLD_PREFIX.unpack(prefix)
    end = begins + _OLD_PREFIX.size + size + body
    if not size or end + MARK_BYTES > total:
        return None
    header = file.read(size)
    fields = _fields(header, body) if crc32(header) == checksum else None
    if fields is None:
        return None
    frames = tuple(file.read(length) for length in fields["frames"])
    return _Whole(fields["record"], frames, 0, 0) if file.read(MARK_BYTES) == head.mark else None


def _fields(header: bytes, body: int) -> dict[str, Any] | None:
    """What a header says, where it can be the header of a record with so many bytes of frames."""
    try:
        fields = msgpack.unpackb(header)
        lengths: Sequence[int] = fields["frames"]
        return dict(fields) if all(length >= 0 for length in lengths) and sum(lengths) == body else None
    except (ValueError, KeyError, TypeError, msgpack.exceptions.ExtraData, msgpack.exceptions.FormatError, msgpack.exceptions.StackError):
        return None
