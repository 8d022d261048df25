"""What the coordinator confirmed, in the worker's own hand, for `shoal audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO


class Receipts:
    """One line for each contribution: worker, number, what became of it, version."""

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, worker: str, seq: int, status: str, version: int) -> None:
        if self._file is not None:
            self._file.write(json.dumps([worker, seq, status, version]) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
