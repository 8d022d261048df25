"""`shoal down`: saves and ends a run that `shoal up` started."""

from __future__ import annotations

import argparse
from pathlib import Path

_PATIENCE_S = 90.0


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("shoal down", description="Save and end a run that `shoal up` started, with all its workers.")
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--patience", type=float, default=_PATIENCE_S, metavar="SECONDS", help="time limit for saving (default: 90)")
    arguments = parser.parse_args(argv)
    from shoal.launch.up_file import take_down

    saved = take_down(Path(arguments.run), arguments.patience)
    how = "saved and ended" if saved else "ended at once, since it did not end by itself; nothing that was confirmed is lost"
    print(f"{arguments.run}: {how}\ngo on:  shoal up --run-dir {arguments.run} --resume\naudit:  shoal audit {arguments.run}")
    return 0
