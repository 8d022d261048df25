"""Where a coordinator keeps what must survive it: in files of its run. (In a database: `transports/postgres/store.py`.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.coordinator.journal import Journal, Ledger
from shoal.runs.checkpoint import Checkpoints

Result = TypeVar("Result")


class Files:
    """A store in a folder."""

    transactional = False

    def __init__(self, folder: Path) -> None:
        self.journal, self.ledger = Journal(folder), Ledger(folder)
        self.snapshots = Checkpoints(folder / "snapshots", 2)

    def carry_out(self, work: Callable[[], Result]) -> Result:
        return work()

    def forget(self) -> None:
        self.journal.forget_before(int(self.snapshots.all()[0].name.partition("-")[2]))
