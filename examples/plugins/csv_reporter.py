"""A reporter: the losses as a table that a spreadsheet reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from shoal.plugins import Reporter, Run, Sink, builds


class Csv(Sink):
    """A table with a line for every record."""

    kind: Literal["csv"] = "csv"
    path: str = "losses.csv"
    """Where it is written."""


@builds(Csv)
class CsvReporter(Reporter):
    def __init__(self, settings: Csv, run: Run) -> None:
        self.path = Path(settings.path)
        self.path.write_text("split,step,loss\n", encoding="utf-8")

    def record(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as table:
            table.write(f"{record['split']},{record['step']},{record.get('loss')}\n")
