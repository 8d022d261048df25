"""`shoal repair`: repairs a run with damaged files, and says what is lost."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.audit import in_database, state_of
from shoal.errors import ShoalError


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal repair",
        description="Repair a run with damaged files or a damaged database, so that it can be resumed. Unusable records are set aside.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, or that of its coordinator's state")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.run)
    if in_database(folder):
        return _report(_repair_database(folder))
    state = folder if (folder / "snapshots").is_dir() else state_of(folder)
    if not (state / "snapshots").is_dir():
        raise ShoalError(f"there are no snapshots of a coordinator in {state}: there is nothing to repair")

    from shoal.runs.folder.repair import repair

    return _report(repair(state, (folder if state != folder else folder.parent) / "workers", print))


def _repair_database(folder: Path) -> bool:
    from shoal.cli.db import database_location
    from shoal.cli.options import make_parser, parse
    from shoal.runs.folder.repair import repair_database

    with database_location(*parse(make_parser("repair", ""), [str(folder)])) as place:
        return repair_database(place.access.address, folder / "coordinator", print)


def _report(repaired: bool) -> int:
    if not repaired:
        print("there is nothing to repair: the run can be resumed as it is")
    return 0
