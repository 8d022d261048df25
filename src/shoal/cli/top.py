"""`shoal top`: shows a run live in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.cli import status as status_command
from shoal.cli.status import folder_of, owner_file
from shoal.errors import ShoalError
from shoal.reporters.text_status import event_lines, lines, member_rows
from shoal.runs.folder.run_reader import UNFINISHED_STATES
from shoal.runs.owner import fetch_status, read_owner_file

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEAD = 12
"""Lines for the run's own figures and spacing."""
_EVENTS = 6


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("shoal top", description="Show a run with its workers, live, until it ends or you press Ctrl-C.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's folder, or a copy of its owner.json (default: the newest in runs)")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="refresh interval (default: 1)")
    arguments = parser.parse_args(argv)
    read_status, where = _status_source([arguments.run] if arguments.run else [])
    if not sys.stdout.isatty():
        raise ShoalError(f"`shoal top` needs a terminal; `shoal status {where}` prints once")
    from rich.live import Live

    try:
        with Live(drawn(read_status()), screen=True, auto_refresh=False) as live:
            while True:
                status = read_status()
                live.update(drawn(status, live.console.height), refresh=True)
                if status["state"] not in UNFINISHED_STATES:
                    break
                time.sleep(max(0.2, arguments.every))
    except KeyboardInterrupt:
        return 0
    return status_command.run([where])


def _status_source(given: list[str]) -> tuple[Callable[[], dict[str, Any]], str]:
    """A function that reads the run's status, and the run's name."""
    if (owner := owner_file(given)) is not None:
        known = read_owner_file(owner)
        return lambda: fetch_status(known), str(owner)
    folder = folder_of(given)
    if folder is None:
        raise ShoalError(f"{[*given, 'runs'][0]} is no folder: name a run's folder, or start a run in this one (`shoal train`)")
    return folder.status, str(folder.path)


def drawn(status: dict[str, Any], height: int = 40) -> RenderableType:
    """A run as tables, cut to the height of a terminal."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    for name, text in lines(status):
        head.add_row(Text(name, style="dim"), Text(text))  # a worker's own text is no markup
    columns, *rows = member_rows(status)
    max_rows = max(3, height - _HEAD - _EVENTS)
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows[:max_rows]:
        table.add_row(*(Text(cell, overflow="ellipsis") for cell in row))
    left_out = len(rows) - len(rows[:max_rows]) + int(status["members_left_out"])
    more = Text(f"and {left_out} more workers" if left_out else "", style="dim")
    bar = ProgressBar(total=1.0, completed=float(status["progress"] or 0.0), width=60)
    events = [Text(line, overflow="ellipsis", no_wrap=True) for line in event_lines(status["events"], _EVENTS)]
    workers: list[RenderableType] = [table, more, Text("")] if rows else []
    return Group(head, bar, Text(""), *workers, *events)
