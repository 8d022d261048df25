"""What makes the coordinator durable: a snapshot now and then, a journal of every record since, and a ledger of what entered which version.

coordinator/
  snapshots/step-00000003/     the learner and the coordinator, as in any checkpoint; the third that was taken
  journal-00000003             records taken since then; a crash may have cut off the last one
  ledger.jsonl                 one line a version: which contributions and which batches went into it

Snapshots are numbered as they come, so none ever takes another's place, and each is followed by the journal of the same number. That
journal is there first: if the snapshot never gets whole, the one before it and both journals lead to the same state.
"""

from __future__ import annotations

import json
import os
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


class Journal:
    """Records, appended. They are in the system's hands when `append` returns, and so survive the end of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None
        self.bytes_since_snapshot = self.records_since_snapshot = 0

    def begin(self, pending: Iterable[tuple[dict[str, Any], Frames]] = ()) -> int:
        """Start a journal, with what belongs to rounds that are open; the number of the snapshot that is to follow."""
        self.close()
        number = max(journals(self.folder), default=0) + 1
        self._open(path_of(self.folder, number), "xb")
        self.bytes_since_snapshot = self.records_since_snapshot = 0
        for record, frames in pending:
            self.append(record, frames)
        return number

    def recover(self, snapshot: int) -> Iterator[tuple[dict[str, Any], tuple[bytes, ...]]]:
        """Every record since a snapshot; what follows is appended after the last. What a crash cut off is dropped."""
        numbers = [number for number in sorted(journals(self.folder)) if number >= snapshot]
        if numbers != list(range(snapshot, snapshot + len(numbers))) or not numbers:
            raise ShoalError(f"a journal that follows snapshot {snapshot} is missing in {self.folder}: put it back, or start a new run")
        for number in numbers:
            path, end = path_of(self.folder, number), 0
            for record, frames, end in read(path):  # noqa: B007
                yield record, frames
            if number != numbers[-1] and end != path.stat().st_size:
                raise ShoalError(f"{path} is damaged after {end} bytes, and there is a later one: restore it, or start a new run")
        self._go_on(path_of(self.folder, numbers[-1]), end)

    def _go_on(self, path: Path, length: int) -> None:
        self.close()
        file = self._open(path, "r+b")
        file.truncate(length)
        file.seek(length)
        self.bytes_since_snapshot = length

    def _open(self, path: Path, mode: str) -> BinaryIO:
        try:
            file: Any = path.open(mode, buffering=0)
        except OSError as error:
            raise ShoalError(f"cannot open the coordinator's journal {path}: {error.strerror or error}") from None
        self._file = file
        opened: BinaryIO = file
        return opened

    def append(self, record: dict[str, Any], frames: Frames = ()) -> None:
        assert self._file is not None
        header: bytes = msgpack.packb({"record": record, "frames": [len(frame) for frame in frames]})
        prefix = _PREFIX.pack(len(header), zlib.crc32(header), sum(len(frame) for frame in frames))
        try:
            _write_all(self._file, (prefix + header, *frames))
        except OSError as error:
            raise ShoalError(f"cannot write the coordinator's journal in {self.folder}: {error.strerror or error}") from None
        self.records_since_snapshot += 1
        self.bytes_since_snapshot += len(prefix) + len(header) + sum(len(frame) for frame in frames)

    def forget_before(self, number: int) -> None:
        """No snapshot older than this is kept: nor are the journals that follow them."""
        for old in journals(self.folder):
            if old < number:
                path_of(self.folder, old).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
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
    end, total = 0, path.stat().st_size
    with path.open("rb") as file:
        while len(prefix := file.read(_PREFIX.size)) == _PREFIX.size:
            size, checksum, body = _PREFIX.unpack(prefix)
            if not size or end + _PREFIX.size + size + body > total:
                return
            header = file.read(size)
            if zlib.crc32(header) != checksum:
                return
            fields = msgpack.unpackb(header)
            end += _PREFIX.size + size + body
            yield fields["record"], tuple(file.read(length) for length in fields["frames"]), end


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
