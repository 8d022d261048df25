"""Watched runs: the contents of their folders, kept up to date by reading what was added since the last time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.dashboard.ledger_digest import LedgerDigest
from shoal.errors import ShoalError
from shoal.runs.folder.run_reader import RunFolder, Tail, clean
from shoal.runs.monitoring.history import FILE as HISTORY

_MOST_RECORDS, _MOST_MOMENTS, _MOST_EVENTS = 4000, 1000, 2000


class Series:
    """Lines of a file that grows. When there are too many, every second one is left out, and `generation` changes: then readers
    begin again."""

    def __init__(self, path: Path, most: int) -> None:
        self.tail, self.most = Tail(path), most
        self.lines: list[dict[str, Any]] = []
        self.generation, self._every, self._seen = 0, 1, 0

    def look(self) -> bool:
        """Read on; whether there may be more to read at once."""
        before, count = self.tail.began, 0
        for line in self.tail.values():
            count += 1
            if self.tail.began != before:  # the file was replaced by another one
                before, self.lines, self._every = self.tail.began, [], 1
                self.generation += 1
            self._take(line)
        return count > 0

    def _take(self, line: dict[str, Any]) -> None:
        self._seen += 1
        if line.get("split") == "eval" or self._seen % self._every == 0:  # evaluations are few, and all of them count
            self.lines.append(clean(line))
        if len(self.lines) > self.most:
            self.lines = [one for number, one in enumerate(self.lines) if number % 2 or one.get("split") == "eval"]
            self._every *= 2
            self.generation += 1


class StreamPosition(NamedTuple):
    """How far a reader has come in each series."""

    generation: int = -1
    records: int = 0
    moments: int = 0
    events: int = 0


class WatchedRun:
    """One run."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self._lock = folder, threading.Lock()
        self.records = Series(folder.path / "metrics.jsonl", _MOST_RECORDS)
        self.moments = Series(folder.path / HISTORY, _MOST_MOMENTS)
        self.events = Series(folder.path / "events.jsonl", _MOST_EVENTS)
        self._ledger, self.digest = Tail(folder.state_path / "ledger.jsonl"), LedgerDigest()
        self.status: dict[str, Any] = folder.status()

    def look(self) -> None:
        """See what has come since the last look. Long files are read in pieces, and are whole after a few looks."""
        with self._lock:
            for series in (self.records, self.moments, self.events):
                series.look()
            began = self._ledger.began
            for line in self._ledger.look():
                if self._ledger.began != began:
                    began, self.digest = self._ledger.began, LedgerDigest()
                self.digest.add(line)
            try:
                self.status = self.folder.status()
            except ShoalError as error:  # a coordinator of another version has taken over
                self.status = self.status | {"state": str(error)}

    @property
    def _generation(self) -> int:
        return self.records.generation + self.moments.generation + self.events.generation

    def since(self, place: StreamPosition) -> tuple[dict[str, Any], StreamPosition]:
        """What a reader at a place does not know yet, and its new place."""
        with self._lock:
            again = place.generation != self._generation
            known = StreamPosition() if again else place
            told = {
                "reset": again,
                "name": self.folder.name,
                "status": self.status,
                "records": self.records.lines[known.records :],
                "moments": self.moments.lines[known.moments :],
                "events": self.events.lines[known.events :],
                "ledger": self.digest.summary(),
                "samples": [one._asdict() for one in self.folder.samples()][-500:],
                "checkpoints": [one._asdict() for one in self.folder.checkpoints()],
            }
            counts = (len(self.records.lines), len(self.moments.lines), len(self.events.lines))
            return told, StreamPosition(self._generation, *counts)


class WatchedRuns:
    """Several runs, looked at by one thread however many people watch, and only while anybody does."""

    def __init__(self, folders: Sequence[RunFolder]) -> None:
        self.runs = [WatchedRun(folder) for folder in folders]

    def look(self) -> None:
        for run in self.runs:
            run.look()
