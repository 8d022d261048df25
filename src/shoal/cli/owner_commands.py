"""Shared by `shoal pause`, `resume`, `stop` and `evict`: a command to a run's coordinator, signed with the owner's key."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.main import parser_of

EPILOG = """\
RUN is the run's folder or, from another machine, a copy of its owner.json. That file gives control over the run: keep it secret.
"""


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = parser_of(name, description, EPILOG)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its owner.json")
    return parser


def send_command(run: str, action: str, name: str | None = None) -> int:
    """Send a command to the coordinator and print its answer."""
    from shoal.runs.owner import read_owner_file, send_command

    print(send_command(read_owner_file(Path(run)), action, name))
    return 0
