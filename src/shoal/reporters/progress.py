"""Progress for people: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from shoal.reporters import class_table
from shoal.runs.monitoring.recorder import Recorder, Reporter

_LOUD = ("loss", "accuracy", "perplexity", "discriminator_loss", "generator_loss", "discriminator_accuracy", "epsilon", "score", "kl")


_ABOUT = ("step", "split", "samples", "epoch", "wall_s")
"""What a record of an evaluation has besides its metrics."""


def figures(record: Mapping[str, Any], every: bool = False) -> str:
    """The metrics of a record that people look at, as text. `every`: all of an evaluation, as a program has metrics of its own."""
    names = [name for name in _LOUD if name in record]
    more = [name for name in record if name not in (*names, *_ABOUT)] if every else []
    return "  ".join(f"{name} {record[name]:.4g}" for name in (*names, *more))


def _speed(record: Mapping[str, Any]) -> str:
    """Samples and tokens a second: slow runs have less than one."""
    found = {name: record.get(f"{name}_per_s") for name in ("samples", "tokens")}
    return ", ".join(
        f"{f'{speed:,.0f}' if speed >= 9.5 else f'{speed:.2g}'} {name}/s" for name, speed in found.items() if speed is not None
    )


class PlainProgress(Reporter):
    """A line for each evaluation, and one every few seconds. At level DEBUG every record, from WARNING on only warnings."""

    own_metrics = False
    """Whether evaluations have metrics of a program's own."""

    def __init__(self, stream: TextIO, level: str = "INFO", every_s: float = 5.0) -> None:
        self.stream = stream
        self.quiet = level in ("WARNING", "ERROR")
        self.mute = level == "ERROR"
        self.every_s = 0.0 if level == "DEBUG" else every_s
        self._last = 0.0

    def start(self, recorder: Recorder) -> None:
        self.recorder = recorder
        if recorder.step:
            self.message(f"resumed from {recorder.resumed_from} at {recorder.step_name} {recorder.step}")

    def record(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        if record["split"] == "train" and now - self._last < self.every_s and self.recorder.completed < self.recorder.engine.total_steps:
            return
        self._last = now
        rate = f"  {_speed(record)}" if "samples_per_s" in record else ""
        shown = figures(record, every=self.own_metrics and record["split"] == "eval")
        self.message(f"{self.recorder.at(record['step'])}  {record['split']}: {shown}{rate}")

    def message(self, text: str) -> None:
        if not self.quiet or (text.startswith("warning") and not self.mute):
            self.stream.write(text + "\n")
            self.stream.flush()


class LiveProgress(Reporter):
    """A bar with the latest figures, the time it took and the time it will take."""

    own_metrics = False
    refreshes_per_s = 10.0

    def __init__(self, stream: TextIO) -> None:
        self.console = Console(file=stream)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[at]}"))
        self.progress = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))
        self.live: Live | None = None
        self.bar: TaskID | None = None

    def renderable(self) -> RenderableType:
        return self.progress

    def start(self, recorder: Recorder) -> None:
        self.recorder = recorder
        if recorder.step:
            self.message(f"resumed from {recorder.resumed_from} at {recorder.step_name} {recorder.step}")
        self.bar = self.progress.add_task(
            "training", total=recorder.engine.total_steps, completed=recorder.completed, at=recorder.at(recorder.step), figures=""
        )
        self.live = Live(console=self.console, get_renderable=self.renderable, refresh_per_second=self.refreshes_per_s)
        self.live.start(refresh=True)

    def step(self, recorder: Recorder) -> None:
        if self.bar is not None:
            self.progress.update(self.bar, completed=recorder.completed, at=recorder.at(recorder.step))

    def record(self, record: dict[str, Any]) -> None:
        if record["split"] == "eval":
            self.message(f"{self.recorder.step_name} {record['step']}  eval: {figures(record, every=self.own_metrics)}")
        elif self.bar is not None:
            self.progress.update(self.bar, figures=f"{figures(record)}  {_speed(record)}")

    def message(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def close(self, summary: dict[str, Any]) -> None:
        if self.live is not None:
            self.live.stop()


def _worded(what: str, cell: str) -> str:
    """A cell of the table of workers, in a sentence: `3 accepted`, but `lag 0`."""
    return f"{what} {cell}" if what in ("lag", "task", "idle", "share") else f"{cell} {what}"


class PlainCluster(PlainProgress):
    """Lines for a run with workers: now and then also who does what."""

    def start(self, recorder: Recorder) -> None:
        super().start(recorder)
        self._table_at = time.monotonic()  # at first there is nothing to show

    def step(self, recorder: Recorder) -> None:
        now = time.monotonic()
        if now - self._table_at < max(self.every_s, 5.0):
            return
        self._table_at = now
        (_, _, *names), *rows = rows_of(recorder)
        for name, state, *cells in rows:
            self.message(f"  {name}: " + ", ".join([state, *map(_worded, names, cells)]))


class LiveCluster(LiveProgress):
    """A table of the workers above the bar."""

    refreshes_per_s = 4.0

    def renderable(self) -> RenderableType:
        return Group(table_of(self.recorder), self.progress)


def rows_of(recorder: Recorder) -> list[tuple[str, ...]]:
    """What every worker does, as text; the names of the columns first."""
    assert recorder.members is not None
    members = recorder.members()
    return class_table.worker_table(members.rows) if members.in_database else class_table.member_table(members.rows)


def table_of(recorder: Recorder) -> Table:
    columns, *rows = rows_of(recorder)
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # what a worker says of itself is no markup
    return table


class JsonLines(PlainProgress):
    """The progress as JSON objects, one per line: the time, the level, and a record's figures or a message."""

    def record(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.quiet or (record["split"] == "train" and now - self._last < self.every_s):
            return
        self._last = now
        self._write("debug" if self.every_s == 0.0 else "info", "record", record)

    def message(self, text: str) -> None:
        warns = text.startswith("warning")
        if not self.quiet or (warns and not self.mute):
            self._write("warning" if warns else "info", "message", {"message": text.removeprefix("warning: ")})

    def close(self, summary: dict[str, Any]) -> None:
        if not self.quiet:
            self._write("info", "summary", summary)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()}
        self.stream.write(json.dumps({"at": round(time.time(), 3), "level": level, "event": event, **finite}, default=str) + "\n")
        self.stream.flush()


def progress_for(stream: TextIO, level: str, cluster: bool = False, form: str = "text") -> PlainProgress | LiveProgress:
    """A bar on a terminal at the usual level; lines elsewhere, as many as the level asks for."""
    if form == "json":
        return JsonLines(stream, level)
    if stream.isatty() and level == "INFO":
        return LiveCluster(stream) if cluster else LiveProgress(stream)
    return PlainCluster(stream, level) if cluster else PlainProgress(stream, level)
