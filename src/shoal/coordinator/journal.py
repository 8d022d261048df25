"""What makes the coordinator durable: a snapshot now and then, a journal of every record since, and a ledger of what entered which version.

coordinator/
  snapshots/step-00000003/     the learner and the coordinator, as in any checkpoint; the third that was taken
  journal-00000003             records taken since then; a crash may have cut off the last one
  spare-journal                a journal that is not needed any more, for the next one to be written over
  ledger.jsonl                 one line a version: which contributions and which batches went into it

Snapshots are numbered as they come, so none ever takes another's place, and each is followed by the journal of the same number. That
journal is there first: if the snapshot never gets whole, the one before it and both journals lead to the same state.

To write over an old file takes the system a fraction of the time that a growing one does. So a journal begins with a mark that nobody can
guess, and each record ends with it: what is left of older records has other marks, and what was cut off has none.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgpack  # type: ignore[import-untyped]

from shoal.coordinator.effects import Frames
from shoal.errors import ShoalError

_AT_ONCE: Callable[[int, list[memoryview]], int] | None = getattr(os, "writev", None)
_PREFIX = struct.Struct("<IIQ")  # bytes and checksum of the header, bytes of the frames
_MARK_BYTES = 8
_SPARE = "spare-journal"


class Journal:
    """Records, appended. They are in the system's hands when `append` returns, and so survive the end of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None
        self._mark = b""
        self.bytes_since_snapshot = self.records_since_snapshot = 0

    def begin(self, pending: Iterable[tuple[dict[str, Any], Frames]] = ()) -> int:
        """Start a journal, with what belongs to rounds that are open; the number of the snapshot that is to follow."""
        self.close()
        number = max(journals(self.folder), default=0) + 1
        spare, path = self.folder / _SPARE, path_of(self.folder, number)
        with self._opened(spare, "r+b" if spare.exists() else "xb") as file:
            file.write(secrets.token_bytes(_MARK_BYTES))  # before it gets its name: the records in it are not this journal's
        spare.rename(path)
        self._go_on(path, _MARK_BYTES)
        self.records_since_snapshot = 0
        for record, frames in pending:
            self.append(record, frames)
        return number

    def recover(self, snapshot: int) -> Iterator[tuple[dict[str, Any], tuple[bytes, ...]]]:
        """Every record since a snapshot; what follows is appended after the last. What a crash cut off is dropped."""
        numbers = [number for number in sorted(journals(self.folder)) if number >= snapshot]
        if numbers != list(range(snapshot, snapshot + len(numbers))) or not numbers:
            raise ShoalError(f"a journal that follows snapshot {snapshot} is missing in {self.folder}: put it back, or start a new run")
        for number in numbers:
            path, end = path_of(self.folder, number), _MARK_BYTES
            for record, frames, end in read(path):  # noqa: B007
                yield record, frames
            if number != numbers[-1] and end != path.stat().st_size:
                raise ShoalError(f"{path} is damaged after {end} bytes, and there is a later one: restore it, or start a new run")
        self._go_on(path_of(self.folder, numbers[-1]), end).truncate()

    def _go_on(self, path: Path, end: int) -> BinaryIO:
        """Append to a journal after its last whole record."""
        self.close()
        self._file = self._opened(path, "r+b")
        self._mark = self._file.read(_MARK_BYTES)
        if len(self._mark) < _MARK_BYTES:  # cut off so early that it is as good as new
            self._mark = secrets.token_bytes(_MARK_BYTES)
            self._file.seek(0)
            self._file.write(self._mark)
        self._file.seek(end)
        self.bytes_since_snapshot = end
        return self._file

    def _opened(self, path: Path, mode: str) -> BinaryIO:
        try:
            file: Any = path.open(mode, buffering=0)
        except OSError as error:
            raise ShoalError(f"cannot open the coordinator's journal {path}: {error.strerror or error}") from None
        opened: BinaryIO = file
        return opened

    def append(self, record: dict[str, Any], frames: Frames = ()) -> None:
        assert self._file is not None
        header: bytes = msgpack.packb({"record": record, "frames": [len(frame) for frame in frames]})
        prefix = _PREFIX.pack(len(header), zlib.crc32(header), sum(len(frame) for frame in frames))
        try:
            _write_all(self._file, (prefix + header, *frames, self._mark))
        except OSError as error:
            raise ShoalError(f"cannot write the coordinator's journal in {self.folder}: {error.strerror or error}") from None
        self.records_since_snapshot += 1
        self.bytes_since_snapshot += len(prefix) + len(header) + sum(len(frame) for frame in frames) + _MARK_BYTES

    def forget_before(self, number: int) -> None:
        """No snapshot older than this is kept: nor are the journals that follow them."""
        for old in journals(self.folder):
            if old < number:
                path_of(self.folder, old).replace(self.folder / _SPARE)

    def close(self) -> None:
        if self._file is not None:
            self._file.truncate()  # what is left of an older journal
            self._file.close()
            self._file = None


def path_of(folder: Path, number: int) -> Path:
    return folder / f"journal-{number:08d}"


def journals(folder: Path) -> list[int]:
    """The numbers of the journals that are there."""
    names = [path.name.removeprefix("journal-") for path in folder.glob("journal-*")]
    return [int(name) for name in names if name.isdecimal()]


def _write_all(file: BinaryIO, parts: Sequence[bytes | memoryview]) -> None:
    """In one call where the system can."""
    views = [memoryview(part).cast("B") for part in parts]
    if _AT_ONCE is not None:
        written = _AT_ONCE(file.fileno(), views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
    for view in views:
        while len(view):
            view = view[file.write(view) :]


def read(path: Path) -> Iterator[tuple[dict[str, Any], tuple[bytes, ...], int]]:
    """Whole records of a journal, each with the length of the file up to its end. What a crash cut off is not one."""
    if not path.exists():
        return
    end, total = _MARK_BYTES, path.stat().st_size
    with path.open("rb") as file:
        mark = file.read(_MARK_BYTES)
        while len(prefix := file.read(_PREFIX.size)) == _PREFIX.size:
            size, checksum, body = _PREFIX.unpack(prefix)
            begins, end = end + _PREFIX.size, end + _PREFIX.size + size + body + _MARK_BYTES
            if not size or end > total or _read_at(file, end - _MARK_BYTES, _MARK_BYTES) != mark:
                return
            header = _read_at(file, begins, size)
            if zlib.crc32(header) != checksum:
                return
            fields = msgpack.unpackb(header)
            yield fields["record"], tuple(file.read(length) for length in fields["frames"]), end
            file.seek(end)


def _read_at(file: BinaryIO, position: int, length: int) -> bytes:
    file.seek(position)
    return file.read(length)


class Ledger:
    """One line for each version, and for whatever happened to a contribution besides."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None

    def append(self, line: dict[str, Any]) -> None:
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            _write_all(self._file, (json.dumps(line, separators=(",", ":")).encode() + b"\n",))
        except OSError as error:
            raise ShoalError(f"cannot write {self.path}: {error.strerror or error}") from None

    @property
    def length(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, length: int) -> None:
        """Back to what a snapshot knows of; the records since then write the rest again."""
        self.close()
        if self.length < length:
            raise ShoalError(f"{self.path} is shorter than when the snapshot was taken: restore it, or start a new run")
        if self.path.exists():
            os.truncate(self.path, length)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
