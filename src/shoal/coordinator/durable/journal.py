"""Journal files: what makes the coordinator durable, with snapshots and the ledger.

coordinator/
  lock                         held by the coordinator that works in this folder
  snapshots/step-00000003/     learner and coordinator, in the format of a checkpoint; the third that was taken
  journal-00000003             records since then (`records.py`); a crash may have cut off the last one
  spare-journal                an old journal, for the next one to be written over
  ledger.jsonl                 one line per version: which contributions and which batches went into it (`ledger.py`)

Snapshots are numbered in order, and each is followed by the journal of the same number. The journal is created first: if the snapshot is
never completed, the one before it and both journals lead to the same state.

Writing over an old file takes the system a fraction of the time that a growing file takes: that is why the spare journal is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from shoal.coordinator.durable.lock import FolderLock
from shoal.coordinator.durable.records import (
    MARK_BYTES,
    NOWHERE,
    DamagedJournal,
    JournalHead,
    JournalReader,
    RecordEnd,
    encode_record,
    follows,
    new_head,
)
from shoal.errors import ShoalError
from shoal.files import open_file
from shoal.protocol.messages import Frames

_WRITEV: Callable[[int, list[memoryview]], int] | None = getattr(os, "writev", None)
_SPARE = "spare-journal"


class FileJournal:
    """Journal in a folder. When `append` returns, the operating system has the record, so it survives the end of this process.

    Holds: of several coordinators in one folder, only the one whose lock file is there writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.records_since_snapshot = 0
        self._lock = FolderLock(folder)
        self._file: BinaryIO | None = None
        self._head = JournalHead(b"", NOWHERE, NOWHERE)
        self._end = NOWHERE

    @property
    def bytes_since_snapshot(self) -> int:
        return self._end.length

    @property
    def open(self) -> bool:
        """Whether records can be appended."""
        return self._file is not None

    def begin(self, pending: Iterable[tuple[dict[str, Any], Frames]] = ()) -> int:
        """Start a journal with these records; return its snapshot's number. If it fails, records still go to the journal before."""
        self._lock.take()
        self._lock.check()
        number = max(journals(self.folder), default=0) + 1
        spare, path = self.folder / _SPARE, path_of(self.folder, number)
        file = self._opened(spare, "r+b" if spare.exists() else "xb")
        try:
            records, head, end = self._fill(file, pending)
            spare.rename(path)  # last: only now the records belong to this journal
        except OSError as error:
            file.close()
            raise self._failed(spare, error) from None
        self._close_file()
        self._file, self._head, self._end, self.records_since_snapshot = file, head, end, records
        return number

    def _fill(self, file: BinaryIO, pending: Iterable[tuple[dict[str, Any], Frames]]) -> tuple[int, JournalHead, RecordEnd]:
        """Write the head and the first records of a new journal."""
        content, head = new_head(self._end)
        _write_all(file, [content])
        records, end = 0, head.begins
        for record, frames in pending:
            parts, end = encode_record(record, frames, head, end)
            _write_all(file, parts)
            records += 1
        return records, head, end

    def recover(self, snapshot: int) -> Iterator[tuple[dict[str, Any], tuple[bytes, ...]]]:
        """Every record since a snapshot, but one that a crash cut off; then `append` continues after the last. Raises DamagedJournal."""
        self._lock.take()
        reading: JournalReader | None = None
        for number in self._numbers_since(snapshot):
            before, reading = reading, JournalReader(path_of(self.folder, number))
            if before is not None and not follows(before, reading.head):
                what = "it ends before its time: the journal that follows it knows of more records"
                raise DamagedJournal(before.path, before.end, before.records, what)
            yield from reading
        assert reading is not None
        self._continue(reading)

    def _numbers_since(self, snapshot: int) -> list[int]:
        numbers = [number for number in sorted(journals(self.folder)) if number >= snapshot]
        if numbers != list(range(snapshot, snapshot + len(numbers))) or not numbers:
            raise ShoalError(
                f"a journal that follows snapshot {snapshot} is missing in {self.folder}: put it back from a backup; or let "
                f"`shoal repair {self.folder}` go on without it, which names what is lost"
            )
        return numbers

    def _continue(self, reading: JournalReader) -> None:
        """Append to a journal after its last whole record."""
        self._close_file()
        self._end = reading.end
        file = self._opened(reading.path, "r+b")
        if reading.head is None:  # cut off within its head
            content, self._head = new_head(NOWHERE)
            _write_all(file, [content])
            self._end = self._head.begins
        else:
            self._head = reading.head
        if reading.records:  # its mark may have been cut off
            file.seek(self._end.length - MARK_BYTES)
            _write_all(file, [self._head.mark])
        file.seek(self._end.length)
        file.truncate()
        self._file = file

    def _opened(self, path: Path, mode: Literal["r+b", "xb"]) -> BinaryIO:
        try:
            return open_file(path, mode, buffering=0)
        except ShoalError as error:
            raise ShoalError(f"cannot open the coordinator's journal: {error}") from None

    def append(self, record: dict[str, Any], frames: Frames = ()) -> None:
        self.append_all([(record, frames)])

    def append_all(self, records: Sequence[tuple[dict[str, Any], Frames]]) -> None:
        """Append records in order, in one system call where there is one."""
        assert self._file is not None
        self._lock.check()
        parts, end = list[bytes | memoryview](), self._end
        for record, frames in records:
            encoded, end = encode_record(record, frames, self._head, end)
            parts += encoded
        try:
            _write_all(self._file, parts)
        except OSError as error:
            raise self._failed(Path(str(self._file.name)), error) from None
        self._end = end
        self.records_since_snapshot += len(records)

    def _failed(self, path: Path, error: OSError) -> ShoalError:
        return ShoalError(f"cannot write the coordinator's journal {path}: {error.strerror or error}")

    def forget_before(self, number: int) -> None:
        """Drop the journals of snapshots older than this one, which are not kept either."""
        for old in journals(self.folder):
            if old < number:
                path_of(self.folder, old).replace(self.folder / _SPARE)

    def close(self) -> None:
        self._close_file()
        self._lock.release()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.truncate()  # rest of an older journal
            self._file.close()
            self._file = None


def path_of(folder: Path, number: int) -> Path:
    return folder / f"journal-{number:08d}"


def journals(folder: Path) -> list[int]:
    """Numbers of the journals in a folder."""
    names = [path.name.removeprefix("journal-") for path in folder.glob("journal-*")]
    return [int(name) for name in names if name.isdecimal()]


def _write_all(file: BinaryIO, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts, in one system call where there is one."""
    views = [memoryview(part).cast("B") for part in parts]
    if _WRITEV is not None:
        written = _WRITEV(file.fileno(), views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
    for view in views:
        while len(view):
            view = view[file.write(view) :]
