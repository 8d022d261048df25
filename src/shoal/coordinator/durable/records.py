"""File format of a journal.

    head      magic with the format's number, mark, checksum and length of the journal before, checksum of the head
    record    length of header and frames, checksum of the record before; header; frames; checksum of all that; mark

A journal may be written over an older one: the mark, a random number, tells its records from those of the older one. The checksum of a
record covers its bytes and the checksum before it, so records form a chain, and each journal names the end of the journal before it.

A record that a crash cut off has no mark of this journal after it, and is dropped. A record that does not match its checksum, with a mark
after it, was complete once: that is damage, and is never dropped silently.
"""

from __future__ import annotations

import mmap
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack  # type: ignore[import-untyped]

from shoal.errors import ShoalError
from shoal.files import check_format, open_to_read
from shoal.protocol.checksums import crc32
from shoal.protocol.messages import Frames

FORMAT = 1
_NAME = b"SHOALJ"
MAGIC = b"%s%d\n" % (_NAME, FORMAT)
MARK_BYTES = 8
_HEAD = struct.Struct("<8s8sIQ")
_SUM = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _SUM.size
_PREFIX = struct.Struct("<IQI")
"""Bytes of the header, bytes of the frames, checksum of the record before."""


class RecordEnd(NamedTuple):
    """End of a record or of a head: the length of the file up to there, and the checksum there."""

    length: int
    checksum: int


NOWHERE = RecordEnd(0, 0)
"""The end of the journal before is unknown, or there is none."""


class JournalHead(NamedTuple):
    """Head of a journal."""

    mark: bytes
    before: RecordEnd
    begins: RecordEnd


class DamagedJournal(ShoalError):
    """A journal cannot be read to an end that was there once."""

    def __init__(self, path: Path, sound: RecordEnd, number: int, what: str) -> None:
        super().__init__(
            f"{path} is damaged: {what}. The {number} records before are sound ({sound.length} bytes). Put the file back from a backup; "
            f"or let `shoal repair {path.parent}` set aside what follows the damage, which names what is lost, and resume then"
        )
        self.path, self.sound, self.number = path, sound, number


def new_head(before: RecordEnd) -> tuple[bytes, JournalHead]:
    """Bytes of the head of a new journal, and the head."""
    mark = secrets.token_bytes(MARK_BYTES)
    content = _HEAD.pack(MAGIC, mark, before.checksum, before.length)
    checksum = crc32(content)
    return content + _SUM.pack(checksum), JournalHead(mark, before, RecordEnd(HEAD_BYTES, checksum))


def encode_record(
    record: dict[str, Any], frames: Frames, head: JournalHead, after: RecordEnd
) -> tuple[list[bytes | memoryview], RecordEnd]:
    """Bytes of a record that follows the end `after`, and its own end."""
    header: bytes = msgpack.packb({"record": record, "frames": [len(frame) for frame in frames]})
    body = sum(len(frame) for frame in frames)
    begin = _PREFIX.pack(len(header), body, after.checksum) + header
    checksum = crc32(begin, crc32(head.mark))
    for frame in frames:
        checksum = crc32(frame, checksum)
    end = RecordEnd(after.length + len(begin) + body + _SUM.size + MARK_BYTES, checksum)
    return [begin, *frames, _SUM.pack(checksum) + head.mark], end


def read_head(path: Path) -> JournalHead | None:
    """The head of a journal; None: it was cut off before its first record. Raises DamagedJournal, ShoalError for another format."""
    with open_to_read(path) as file:
        content = file.read(HEAD_BYTES)
    if len(content) < HEAD_BYTES and (len(content) < len(MAGIC) or content.startswith(MAGIC)):
        return None
    if len(content) == HEAD_BYTES:
        _, mark, checksum, length = _HEAD.unpack_from(content)
        (own,) = _SUM.unpack_from(content, _HEAD.size)
        if crc32(MAGIC + content[len(MAGIC) : _HEAD.size]) == own:  # also where the magic itself was damaged
            return JournalHead(mark, RecordEnd(length, checksum), RecordEnd(HEAD_BYTES, own))
    found = content[: len(MAGIC)]
    if found.startswith(_NAME) and found.endswith(b"\n") and found != MAGIC:
        number = found[len(_NAME) : -1].decode("latin-1")
        check_format(path, "journal", number, FORMAT)
    raise DamagedJournal(path, NOWHERE, 0, "its head does not match its checksum")


class JournalReader:
    """One pass through a journal. Afterwards `end` is the end of its last whole record, and `records` counts the records."""

    def __init__(self, path: Path) -> None:
        self.path, self.head, self.records = path, read_head(path), 0
        self.end = self.head.begins if self.head is not None else NOWHERE

    def __iter__(self) -> Iterator[tuple[dict[str, Any], tuple[bytes, ...]]]:
        """Whole records with their frames, in order, without one that a crash cut off. Raises DamagedJournal."""
        if self.head is None:
            return
        with open_to_read(self.path) as file:
            total = file.seek(0, 2)
            while (found := self._next(file, total, self.head)) is not None:
                self.end = RecordEnd(file.tell(), found.checksum)
                self.records += 1
                yield found.record, found.frames
            self._refuse_damage(file, total, self.head)

    def _next(self, file: BinaryIO, total: int, head: JournalHead) -> _WholeRecord | None:
        """The record after `end`; None: there is no whole one."""
        file.seek(self.end.length)
        found = _read_record(file, total, head)
        return found if found is not None and found.before == self.end.checksum else None

    def _refuse_damage(self, file: BinaryIO, total: int, head: JournalHead) -> None:
        if total <= self.end.length:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(head.mark, self.end.length)
        if at >= 0:
            what = f"record {self.records + 1} does not match its checksum or does not follow the one before"
            raise DamagedJournal(self.path, self.end, self.records, what)


def readable_after(path: Path, length: int) -> Iterator[dict[str, Any]]:
    """Records beyond `length` bytes of a journal that are whole by themselves, whatever is between them."""
    try:
        head = read_head(path)
    except DamagedJournal:
        head = None
    if head is None:
        return
    with open_to_read(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = max(length, head.begins.length) - MARK_BYTES
        while at >= 0:
            file.seek(at + MARK_BYTES)
            found = _read_record(file, len(content), head)
            if found is not None:
                yield found.record
            at = content.find(head.mark, at + 1)


def follows(before: JournalReader, head: JournalHead | None) -> bool:
    """Whether a journal begins where the one before it ends, which was read to its end. True if its head does not say."""
    return head is None or head.before in (NOWHERE, before.end)


class _WholeRecord(NamedTuple):
    """A record as it was written."""

    record: dict[str, Any]
    frames: tuple[bytes, ...]
    before: int
    checksum: int


def _read_record(file: BinaryIO, total: int, head: JournalHead) -> _WholeRecord | None:
    """The record at the file's position; None: there is no whole one. Its checksum covers everything but the mark."""
    begins, prefix = file.tell(), file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    size, body, before = _PREFIX.unpack(prefix)
    if begins + _PREFIX.size + size + body + _SUM.size > total:
        return None
    header = file.read(size)
    checksum = crc32(header, crc32(prefix, crc32(head.mark)))
    fields = _decode_header(header, body)
    if fields is None:
        return None
    frames = tuple(file.read(length) for length in fields["frames"])
    for frame in frames:
        checksum = crc32(frame, checksum)
    if _SUM.unpack(file.read(_SUM.size))[0] != checksum:
        return None
    file.seek(MARK_BYTES, 1)
    return _WholeRecord(fields["record"], frames, before, checksum)


def _decode_header(header: bytes, body: int) -> dict[str, Any] | None:
    """The header of a record whose frames have `body` bytes; None: it cannot be one."""
    try:
        fields = msgpack.unpackb(header)
        lengths: Sequence[int] = fields["frames"]
        return dict(fields) if all(length >= 0 for length in lengths) and sum(lengths) == body else None
    except (ValueError, KeyError, TypeError, msgpack.exceptions.ExtraData, msgpack.exceptions.FormatError, msgpack.exceptions.StackError):
        return None
