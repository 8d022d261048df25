"""`shoal invite`: gives one person a separate join token for a limited number of workers, or withdraws it."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.main import warn
from shoal.cli.output import print_secret
from shoal.errors import ShoalError, printable
from shoal.protocol.worker_names import NAME_RULE, is_worker_name
from shoal.runs.folder.run_reader import UNFINISHED_STATES, RunFolder
from shoal.runs.invitation import CoordinatorSecrets, GuestList
from shoal.transports.keys import key_text


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
    if not is_worker_name(arguments.name):
        raise ShoalError(f"`{printable(arguments.name)}` is no name for a guest: {NAME_RULE}")
    if arguments.workers < 1:
        raise ShoalError("--workers: an invitation is for one worker at least")
    state, known = _coordinator_of(Path(arguments.run))
    guests = GuestList(state)
    if not arguments.withdraw:
        token = guests.invite(arguments.name, arguments.workers).token
        key = f" --key {key_text(known.keys.public)}" if known.encrypted else ""
        print_secret(f"{arguments.name} joins with:\n  shoal join {known.shown_address} --token {token}{key}")
        _warn_of_an_end(Path(arguments.run))
    elif guests.withdraw(arguments.name):
        print(f"the invitation of {arguments.name} is withdrawn: its workers are disconnected within a second, and refused from now on")
    else:
        raise ShoalError(f"{arguments.name} has no invitation to this run; invited: {', '.join(guests) or 'none'}")
    return 0


def _warn_of_an_end(folder: Path) -> None:
    """A warning where the run is over, so that the command has no coordinator to reach."""
    state = RunFolder(folder).status()["state"] if (folder / "status.json").exists() else UNFINISHED_STATES[0]
    if state not in UNFINISHED_STATES:
        warn(f"this run is over ({state}): no coordinator answers until it is resumed")


def _coordinator_of(folder: Path) -> tuple[Path, CoordinatorSecrets]:
    """The state folder of a run's coordinator, and its address and keys."""
    state = next((each for each in (folder / "coordinator", folder) if (each / "secrets.json").exists()), None)
    known = CoordinatorSecrets.of(state) if state is not None else None
    if not folder.is_dir():
        raise ShoalError(f"there is no folder {folder}: --run names the folder of the run, which `shoal coordinate` prints")
    if state is None or known is None or not known.address.startswith("tcp://"):
        raise ShoalError(f"{folder} is no run that workers join over ZeroMQ; for a database, use `shoal db grant`")
    return state, known
