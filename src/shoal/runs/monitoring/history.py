"""history.jsonl: what each worker did over time, in a file of bounded size."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.files import open_file, read_file

FILE = "history.jsonl"
FIELDS = ("computing_s", "waiting_s", "sending_s", "accepted", "rejected", "lag", "samples", "memory_bytes")
"""Fields of a worker in each line, in this order; counts are sums since it joined."""
_COUNTS = ("wall_s", "at", "version", "contributions")
"""What else of a status each line has."""
_MOST_BYTES = 4 << 20
_FIRST_EVERY_S = 2.0
_MOST_WORKERS = 200


class History:
    """Appends to the file. When it is full, every second line is dropped, and the interval doubles."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self.path, self.most_bytes = folder / FILE, most_bytes
        self.every_s = _FIRST_EVERY_S
        self._bytes, self._next_at = self.path.stat().st_size if self.path.exists() else 0, 0.0

    def append(self, status: Mapping[str, Any], now: float) -> None:
        """Append what changes in a status, if the interval has passed. Errors of the disk are ignored."""
        if now < self._next_at:
            return
        self._next_at = now + self.every_s
        workers = {row["worker"]: [row["state"], *(_short(row.get(name)) for name in FIELDS)] for row in status["members"][:_MOST_WORKERS]}
        left_out = status["members_left_out"] + max(0, len(status["members"]) - _MOST_WORKERS)
        moment = {**{name: status[name] for name in _COUNTS}, "members_left_out": left_out, "workers": workers}
        line = json.dumps(moment, separators=(",", ":")) + "\n"
        with suppress(OSError, ShoalError):
            with open_file(self.path, "a") as file:
                file.write(line)
            self._bytes += len(line)
            if self._bytes > self.most_bytes:
                self._thin()

    def _thin(self) -> None:
        lines = (read_file(self.path) or b"").splitlines(keepends=True)[::2]
        partial = self.path.with_name(f".{FILE}")
        partial.write_bytes(b"".join(lines))
        os.replace(partial, self.path)
        self._bytes, self.every_s = sum(map(len, lines)), 2 * self.every_s


def _short(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value
