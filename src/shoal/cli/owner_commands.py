"""What `shoal pause`, `resume`, `stop` and `evict` have in common: an order to a run's coordinator, signed with the owner's key."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
RUN is the run's folder, or, from another machine, a copy of the owner.json in it: whoever has that file may give orders.
"""


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"shoal {name}", description=description, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its owner.json")
    return parser


def send_command(run: str, action: str, name: str | None = None) -> int:
    """Give an order, and print what the coordinator says."""
    from shoal.runs.owner import read_owner_file, send_command

    print(send_command(read_owner_file(Path(run)), action, name))
    return 0
