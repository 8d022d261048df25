"""`shoal status`: how a run goes, from its database alone, or from what its coordinator leaves in its folder."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.db import connected, place_of
from shoal.cli.options import parse, parser
from shoal.errors import ShoalError

_FRESH_S = 10.0

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal.transports.postgres.view import View


def run(argv: list[str]) -> int:
    made = parser("status", "Show how a run goes. WHERE is a configuration, a run's folder or a postgresql:// address.")
    made.add_argument("--once", action="store_true", help="show it once, instead of again and again on a terminal")
    made.add_argument("--json", action="store_true", help="once, as JSON")
    made.add_argument("--grid", metavar="FILE", help="save the newest grid of samples as a PNG")
    made.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="how often to look (default: 2)")
    arguments, overrides = parse(made, argv)
    left = _left_in(arguments.files)
    if left is not None:
        return _show_left(left, arguments.json)
    with place_of(arguments, overrides) as place, connected(place.access) as connection:
        from shoal.transports.postgres.view import look, picture

        def view() -> View:
            seen = look(connection)
            if seen is None:
                raise ShoalError(f"{place.access.shown} holds no run yet")
            return seen

        if arguments.grid:
            drawn = picture(connection)
            if drawn is None:
                raise ShoalError("there are no samples yet: they come with the first evaluation")
            Path(arguments.grid).write_bytes(drawn)
        if arguments.json:
            print(json.dumps(view()._asdict(), default=str, indent=2))
            return 0
        if arguments.once or not sys.stdout.isatty():
            _print(view())
            return 0
        from rich.live import Live

        try:
            with Live(_drawn(view()), screen=False, auto_refresh=False) as live:
                while True:
                    time.sleep(max(0.2, arguments.every))
                    live.update(_drawn(view()), refresh=True)
        except KeyboardInterrupt:
            return 0


def _left_in(files: list[str]) -> Path | None:
    """What a coordinator without a database has left in its run's folder."""
    path = Path(files[0]) / "status.json" if len(files) == 1 else None
    return path if path is not None and path.exists() else None


def _show_left(path: Path, as_json: bool) -> int:
    from shoal.watch.classroom import member_table, task_table

    text = path.read_text(encoding="utf-8")
    if as_json:
        print(text)
        return 0
    status, age_s = json.loads(text), time.time() - path.stat().st_mtime
    seen = "now" if age_s < _FRESH_S else f"{age_s:.0f} s ago: the coordinator is not here"
    print(f"run          {status['strategy']}, version {status['version']} of {status['of']}, scheduler {status['scheduler']}")
    print(f"seen         {seen}\n")
    _print_rows(member_table(status["members"]))
    if status["tasks"]:
        print()
        _print_rows(task_table(status["tasks"]))
    return 0


def _drawn(view: View) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from shoal.watch import classroom

    head = Table.grid(padding=(0, 2))
    for name, text in classroom.lines(view):
        head.add_row(name, text)
    columns, *rows = classroom.table(view)
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # what a worker says of itself is no markup
    return Group(head, "", table)


def _print(view: View) -> None:
    from shoal.watch import classroom

    for name, text in classroom.lines(view):
        print(f"{name:<12} {text}")
    print()
    _print_rows(classroom.table(view))


def _print_rows(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
