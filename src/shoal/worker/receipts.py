"""The worker's own record of what the coordinator confirmed, for `shoal audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from shoal.files import make_folder, open_file
from shoal.worker.session import ContributionReceipt


class ReceiptsFile:
    """A file with one line for each contribution: worker, number, outcome, version, and the coordinator's digest and seal, if any."""

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            make_folder(path.parent)
            self._file = open_file(path, "a", private=True, buffering=1)

    def write(self, worker: str, receipt: ContributionReceipt) -> None:
        if self._file is not None:
            proof = [receipt.digest, receipt.seal] if receipt.seal else []
            self._file.write(json.dumps([worker, receipt.seq, receipt.status, receipt.version, *proof]) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
