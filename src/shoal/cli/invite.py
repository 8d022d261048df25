"""`shoal invite`: gives one person a separate join token for a limited number of workers, or withdraws it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.runs.invitation import CoordinatorSecrets

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal invite",
        description="Print the command with which one person's workers join a run. The coordinator may be running. The same name again "
        "prints the same command; --workers changes the number of workers.",
    )
    parser.add_argument("name", help="name of the person")
    parser.add_argument("--run", required=True, metavar="DIR", help="the run's folder, or its coordinator's (coordinator.state_path)")
    parser.add_argument("--withdraw", action="store_true", help="withdraw the invitation: its workers are disconnected and refused")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="most workers at a time (default: 4)")
    arguments = parser.parse_args(argv)
    if not _NAME.fullmatch(arguments.name):
        raise ShoalError(f"`{arguments.name}` is no name for a guest: letters, digits, `.`, `_` and `-`, 64 at most")
    if arguments.workers < 1:
        raise ShoalError("--workers: an invitation is for one worker at least")
    state, known = _door(Path(arguments.run))
    if arguments.withdraw:
        _withdraw(state, arguments.name)
    else:
        print(f"{arguments.name} joins with:\n  {_line(state, known, arguments.name, arguments.workers)}")
    return 0


def _door(folder: Path) -> tuple[Path, CoordinatorSecrets]:
    """The state folder of a run's coordinator, and its address and keys."""
    from shoal.runs.invitation import CoordinatorSecrets

    state = next((each for each in (folder / "coordinator", folder) if (each / "secrets.json").exists()), None)
    known = CoordinatorSecrets.of(state) if state is not None else None
    if state is None or known is None or not known.address.startswith("tcp://"):
        raise ShoalError(f"{folder} is no run that workers join over ZeroMQ; for a database, use `shoal db grant`")
    return state, known


def _withdraw(state: Path, name: str) -> None:
    from shoal.runs.invitation import GuestList

    guests = GuestList(state)
    if not guests.withdraw(name):
        others = ", ".join(guests) or "none"
        raise ShoalError(f"{name} has no invitation to this run; invited: {others}")
    print(f"the invitation of {name} is withdrawn: its workers are disconnected within a second, and refused from now on")


def _line(state: Path, known: CoordinatorSecrets, name: str, workers: int) -> str:
    from shoal.runs.invitation import GuestList
    from shoal.transports.keys import key_text

    guest = GuestList(state).invite(name, workers)
    return f"shoal join {known.address} --token {guest.token}" + (f" --key {key_text(known.keys.public)}" if known.encrypted else "")
