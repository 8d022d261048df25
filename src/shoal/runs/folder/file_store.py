"""Durable state of a coordinator in files: journal, ledger and snapshots. (In a database: `transports/postgres/store.py`.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.coordinator.durable.journal import FileJournal
from shoal.coordinator.durable.ledger import FileLedger
from shoal.coordinator.durable.receipt_seal import key_in
from shoal.runs.folder.checkpoint import Checkpoints

Result = TypeVar("Result")


class FileStore:
    transactional = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal, self.ledger = FileJournal(folder), FileLedger(folder)
        self.snapshots = Checkpoints(folder / "snapshots", 2)

    @property
    def receipt_key(self) -> bytes:
        return key_in(self.folder)

    def carry_out(self, work: Callable[[], Result]) -> Result:
        return work()

    def settle(self) -> list[str]:
        self.ledger.settle()
        return self.ledger.remarks

    def forget(self) -> None:
        self.journal.forget_before(int(self.snapshots.all()[0].name.partition("-")[2]))
