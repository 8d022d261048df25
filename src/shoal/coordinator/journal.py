"""What makes the coordinator durable: a snapshot now and then, a journal of every record since, and a ledger of what entered which version.

coordinator/
  snapshots/step-00000100/     the learner and the coordinator, as in any checkpoint
  journal-00000100             records taken since that version; a crash may have cut off the last one
  ledger.jsonl                 one line a version: which contributions and which batches went into it
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgpack  # type: ignore[import-untyped]

from shoal.coordinator.effects import Frames
from shoal.errors import ShoalError

_PREFIX = struct.Struct("<IIQ")  # bytes and checksum of the header, bytes of the frames


class Journal:
    """Records, appended. They are in the system's hands when `append` returns, and so survive the end of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None
        self.bytes_since_snapshot = 0

    def begin(self, version: int, pending: Sequence[tuple[dict[str, Any], Frames]] = ()) -> None:
        """Start a journal that follows a snapshot of this version, with what belongs to rounds that are open."""
        self.close()
        self._file = (self.folder / f"journal-{version:08d}").open("wb", buffering=0)
        self.bytes_since_snapshot = 0
        for record, frames in pending:
            self.append(record, frames)

    def go_on(self, version: int, length: int) -> None:
        """Append to a journal that was read; what a crash cut off is dropped."""
        self.close()
        path = self.folder / f"journal-{version:08d}"
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(length)
        self._file.seek(length)
        self.bytes_since_snapshot = length

    def append(self, record: dict[str, Any], frames: Frames = ()) -> None:
        assert self._file is not None
        header: bytes = msgpack.packb({"record": record, "frames": [len(frame) for frame in frames]})
        prefix = _PREFIX.pack(len(header), zlib.crc32(header), sum(len(frame) for frame in frames))
        try:
            for part in (prefix + header, *frames):
                _write_all(self._file, part)
        except OSError as error:
            raise ShoalError(f"cannot write the coordinator's journal in {self.folder}: {error.strerror or error}") from None
        self.bytes_since_snapshot += len(prefix) + len(header) + sum(len(frame) for frame in frames)

    def forget_before(self, version: int) -> None:
        """A snapshot of this version is safe: older journals have done their duty."""
        for path in self.folder.glob("journal-*"):
            if path.name < f"journal-{version:08d}":
                path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_all(file: BinaryIO, part: bytes | memoryview) -> None:
    view = memoryview(part)
    while len(view):
        view = view[file.write(view) :]


def read(path: Path) -> Iterator[tuple[dict[str, Any], tuple[bytes, ...], int]]:
    """Whole records of a journal, each with the length of the file up to its end. What a crash cut off is not one."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        while len(prefix := file.read(_PREFIX.size)) == _PREFIX.size:
            size, checksum, body = _PREFIX.unpack(prefix)
            header = file.read(size) if size <= path.stat().st_size else b""
            if len(header) < size or zlib.crc32(header) != checksum:
                return
            fields = msgpack.unpackb(header)
            frames = tuple(file.read(length) for length in fields["frames"])
            if sum(len(frame) for frame in frames) < body:
                return
            end += _PREFIX.size + size + body
            yield fields["record"], frames, end


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
            _write_all(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise ShoalError(f"cannot write {self.path}: {error.strerror or error}") from None

    @property
    def length(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, length: int) -> None:
        """Back to what a snapshot knows of; the records since then write the rest again."""
        self.close()
        if self.path.exists():
            os.truncate(self.path, length)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
