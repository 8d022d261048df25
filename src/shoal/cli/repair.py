"""`shoal repair`: make a run with damaged files fit to be resumed, and say what is lost."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.audit import state_of
from shoal.errors import ShoalError


def run(argv: list[str]) -> int:
    made = argparse.ArgumentParser(
        "shoal repair",
        description="Make a run fit to be resumed whose coordinator's files are damaged. What cannot be used is set aside, not deleted.",
    )
    made.add_argument("run", metavar="RUN", help="the run's folder, or that of its coordinator's state")
    arguments = made.parse_args(argv)
    folder = Path(arguments.run)
    state = folder if (folder / "snapshots").is_dir() else state_of(folder)
    if not (state / "snapshots").is_dir():
        raise ShoalError(f"there are no snapshots of a coordinator in {state}: there is nothing to repair")

    from shoal.runs.repairing import repair

    if not repair(state, (folder if state != folder else folder.parent) / "workers", print):
        print("nothing is damaged that a repair could mend: the run can be resumed as it is")
    return 0
