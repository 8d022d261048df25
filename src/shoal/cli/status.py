"""`shoal status`: shows a run's progress, from its folder or its database."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.db import connected, database_location
from shoal.cli.options import load, make_parser, parse
from shoal.config.load import Override
from shoal.config.presets import find as find_preset
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError
from shoal.files import writing
from shoal.reporters import class_table
from shoal.reporters.text_status import event_lines, figures_of, lines, member_rows, progress_of
from shoal.runs.folder.phases import phases_in
from shoal.runs.folder.run_reader import RunFolder, newest_run
from shoal.runs.owner import fetch_status, read_owner_file
from shoal.transports.database_address import is_address

_SHOWN_EVENTS = 8
_NO_SAMPLES = "there are no samples yet: they come with the first evaluation"

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal.transports.postgres.queries import RunView


def run(argv: list[str]) -> int:
    arguments, overrides = parse(_parser(), argv)
    if (owner := owner_file(arguments.files)) is not None:
        return _show_status(fetch_status(read_owner_file(owner)), arguments.json)
    if phases := phases_of(arguments.files):
        return _show_phases(phases, arguments)
    folder = folder_of(arguments.files) or _folder_of_settings(arguments, overrides)
    if folder is not None:
        return _show_folder(folder, arguments.json, arguments.grid)
    with database_location(arguments, overrides) as place, connected(place.access) as connection:
        from shoal.transports.postgres.queries import look, picture

        def view() -> RunView:
            seen = look(connection)
            if seen is None:
                raise ShoalError(f"{place.access.shown} holds no run yet")
            return seen

        if arguments.grid:
            drawn = picture(connection)
            if drawn is None:
                raise ShoalError(_NO_SAMPLES)
            _save_grid(arguments.grid, drawn)
        if arguments.json:
            print(json.dumps(view()._asdict(), default=str, indent=2))
        elif arguments.once or not sys.stdout.isatty():
            _print(view())
        else:
            _show_live(view, arguments.every)
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "status",
        "Show a run's progress. FILE is a run's folder (default: the newest in runs), or, for a run through PostgreSQL, its configuration "
        "or a postgresql:// address, or, from another machine, a copy of the run's owner.json. `shoal top` shows it live.",
    )
    parser.add_argument("--once", action="store_true", help="for a database: print once instead of refreshing on a terminal")
    parser.add_argument("--json", action="store_true", help="print JSON, once")
    parser.add_argument("--grid", metavar="FILE", help="save the newest grid of samples as a PNG")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="refresh interval for a database (default: 2)")
    return parser


def _show_live(view: Callable[[], RunView], every_s: float) -> None:
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(_drawn(view()), screen=False, auto_refresh=False) as live:
        while True:
            time.sleep(max(0.2, every_s))
            live.update(_drawn(view()), refresh=True)


def folder_of(files: list[str]) -> RunFolder | None:
    """The run's folder; None for a configuration or a database. Raises ShoalError if there is no such run."""
    if not files:
        return newest_run(Path("runs")) if Path("runs").is_dir() else None
    path = Path(files[0])
    if len(files) == 1 and not path.suffix and not path.exists() and not is_address(files[0]) and find_preset(files[0]) is None:
        raise ShoalError(f"there is no folder {path}: `shoal runs` lists the runs that there are")
    return RunFolder(path) if len(files) == 1 and path.is_dir() else None


def owner_file(files: list[str]) -> Path | None:
    """The path of an owner.json, if the argument is one."""
    path = Path(files[0]) if len(files) == 1 else None
    return path if path is not None and path.suffix == ".json" and path.is_file() else None


def phases_of(files: list[str]) -> list[RunFolder]:
    """The phases that have begun, if the argument is the folder of a run in phases."""
    return [RunFolder(path) for path in phases_in(Path(files[0]))] if len(files) == 1 else []


def _show_phases(phases: list[RunFolder], arguments: argparse.Namespace) -> int:
    if arguments.grid:
        raise ShoalError(f"--grid: name one phase, such as {phases[-1].path}")
    found = {phase.path.name: phase.status() for phase in phases}
    if arguments.json:
        print(json.dumps({"phases": found}, indent=2))
        return 0
    rows = [(name, str(status["state"]), progress_of(status), figures_of(status)) for name, status in found.items()]
    _print_rows([("phase", "state", "progress", "figures"), *rows])
    print(f"\n`shoal status {phases[-1].path}` shows one of them")
    return 0


def _folder_of_settings(arguments: argparse.Namespace, overrides: list[Override]) -> RunFolder | None:
    """The newest run of a configuration; None for a run through a database, which knows more than the folder."""
    if arguments.files and is_address(arguments.files[0]):
        return None
    loaded = load(arguments, overrides)
    if not arguments.files and any(problem.code == "missing-file" for problem in loaded.problems):
        return newest_run(Path("runs"))  # raises that there is no run
    transport, output_dir = loaded.values("transport", "output_dir")
    return None if isinstance(transport, Postgres) else newest_run(Path(output_dir))


def _show_folder(folder: RunFolder, as_json: bool, grid: str | None) -> int:
    if grid:
        pictures = [one for one in folder.samples() if one.name.endswith(".png")]
        if not pictures:
            raise ShoalError(_NO_SAMPLES)
        _save_grid(grid, (folder.path / "samples" / pictures[-1].name).read_bytes())
    return _show_status(folder.status(), as_json)


def _save_grid(file: str, drawn: bytes) -> None:
    with writing(file):
        Path(file).write_bytes(drawn)
    print(f"wrote {file}", file=sys.stderr)  # standard output may be JSON


def _show_status(status: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(status, indent=2))
        return 0
    for name, text in lines(status):
        print(f"{name:<12} {text}")
    if status["members"] or status["gone"]:
        print()
        _print_rows(member_rows(status))
    if status["tasks"]:
        print()
        if status["state"] == "completed":  # what is left of an epoch after the last one is not trained
            print(f"{status.get('tasks_done', 0)} tasks are finished")
        else:
            _print_rows(class_table.task_table(status["tasks"]))
            print(f"{status.get('tasks_done', 0)} are finished")
    if status["events"]:
        print("\nevents")
        print("\n".join(f"  {line}" for line in event_lines(status["events"], _SHOWN_EVENTS)))
    return 0


def _drawn(view: RunView) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    for name, text in class_table.lines(view):
        head.add_row(name, text)
    columns, *rows = class_table.table(view)
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a worker's own text is no markup
    return Group(head, "", table)


def _print(view: RunView) -> None:
    for name, text in class_table.lines(view):
        print(f"{name:<12} {text}")
    print()
    _print_rows(class_table.table(view))


def _print_rows(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
