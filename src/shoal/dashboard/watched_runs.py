"""Watched runs: the contents of their folders, kept up to date by reading what was added since the last time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal.dashboard.ledger_digest import LedgerDigest
from shoal.errors import ShoalError
from shoal.runs.folder.run_reader import RunFolder, Tail, clean
from shoal.runs.monitoring.history import FILE as HISTORY

_MOST_RECORDS, _MOST_MOMENTS, _MOST_EVENTS = 4000, 1000, 2000


class Series:
    """Lines of a growing file. Where there are too many, every second one is left out, and `generation` changes: readers begin again."""

    def __init__(self, path: Path, most: int) -> None:
        self.tail, self.most = Tail(path), most
        self.lines: list[dict[str, Any]] = []
        self.generation, self._every, self._seen = 0, 1, 0

    def refresh(self) -> None:
        """Read the new lines, at most a piece of a long file per call."""
        before = self.tail.began
        for line in self.tail.values():
            if self.tail.began != before:  # the file was replaced by another one
                before, self.lines, self._every = self.tail.began, [], 1
                self.generation += 1
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        self._seen += 1
        if line.get("split") == "eval" or self._seen % self._every == 0:  # evaluations are few, and all of them count
            self.lines.append(clean(line))
        if len(self.lines) > self.most:
            self.lines = [one for number, one in enumerate(self.lines) if number % 2 or one.get("split") == "eval"]
            self._every *= 2
            self.generation += 1


class StreamPosition(NamedTuple):
    """How far a reader has come in each series, by its name."""

    generation: tuple[int, ...] = ()
    counts: Mapping[str, int] = {}


class WatchedRun:
    def __init__(self, folder: RunFolder) -> None:
        self.folder, self._lock = folder, threading.Lock()
        self.series = {
            "records": Series(folder.path / "metrics.jsonl", _MOST_RECORDS),
            "moments": Series(folder.path / HISTORY, _MOST_MOMENTS),
            "events": Series(folder.path / "events.jsonl", _MOST_EVENTS),
        }
        self._ledger, self.digest = Tail(folder.state_path / "ledger.jsonl"), LedgerDigest()
        self.status: dict[str, Any] = folder.status()

    def refresh(self) -> None:
        """Read what was written since the last call. Long files are read in pieces, over several calls."""
        with self._lock:
            for series in self.series.values():
                series.refresh()
            began = self._ledger.began
            for line in self._ledger.new_lines():
                if self._ledger.began != began:
                    began, self.digest = self._ledger.began, LedgerDigest()
                self.digest.add(line)
            try:
                self.status = self.folder.status()
            except ShoalError as error:  # a coordinator of another version has taken over
                self.status = self.status | {"state": str(error)}

    def since(self, position: StreamPosition) -> tuple[dict[str, Any], StreamPosition]:
        """What was added after a reader's position, and the new position. Where lines were left out meanwhile, everything is sent again."""
        with self._lock:
            generation = (self._ledger.began, self.digest.generation, *(series.generation for series in self.series.values()))
            growing = {"ledger_before": self.digest.earlier} | {name: series.lines for name, series in self.series.items()}
            again = position.generation != generation
            known = {} if again else position.counts
            added = {
                "reset": again,
                "name": self.folder.name,
                "status": self.status,
                **{name: lines[known.get(name, 0) :] for name, lines in growing.items()},
                "ledger": self.digest.summary(),
                "samples": [one._asdict() for one in self.folder.samples()][-500:],
                "checkpoints": [one._asdict() for one in self.folder.checkpoints()],
            }
            return added, StreamPosition(generation, {name: len(lines) for name, lines in growing.items()})
