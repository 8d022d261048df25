"""The worker's own record of what the coordinator confirmed, for `shoal audit`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TextIO

from shoal.files import make_folder, open_file, writing
from shoal.worker.session import ContributionReceipt

_LONGEST_LINE = 1 << 16


class ReceiptsFile:
    """A file with one line for each contribution: worker, number, outcome, version, and the coordinator's digest and seal, if any."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: TextIO | None = None
        if path is not None:
            make_folder(path.parent)
            self._file = open_file(path, "a", private=True, buffering=1)
            _drop_cut_off_line(path)

    def write(self, worker: str, receipt: ContributionReceipt) -> None:
        if self._file is not None and self.path is not None:
            proof = [receipt.digest, receipt.seal] if receipt.seal else []
            with writing(self.path):
                self._file.write(json.dumps([worker, receipt.seq, receipt.status, receipt.version, *proof]) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _drop_cut_off_line(path: Path) -> None:
    """Remove the end of a last line that a crash cut off, so that the next receipt begins a line."""
    with open_file(path, "r+b", private=True) as file, writing(path):
        start = max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE)
        file.seek(start)
        end = file.read()
        if end and not end.endswith(b"\n"):
            file.truncate(start + end.rfind(b"\n") + 1)
