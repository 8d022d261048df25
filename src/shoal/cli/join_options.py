"""What a worker's user says about the coordinator to join, in options or at the terminal: address, token, name, consent."""

from __future__ import annotations

import argparse
import getpass
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import read_token_file
from shoal.config.environment import database_password, join_token
from shoal.config.load import ConfigFile, resolve
from shoal.config.ranks import rank_place
from shoal.config.schema.cluster import Postgres
from shoal.errors import ShoalError, printable
from shoal.process_exit import DECLINED
from shoal.protocol.worker_names import NAME_RULE, name_of
from shoal.transports.database_address import CLASS_ROLE, access_of, is_address
from shoal.transports.database_address import parse as parse_address

if TYPE_CHECKING:
    from shoal.runs.invitation import Invitation


def refuse_given(arguments: argparse.Namespace, options: Sequence[str], why: str) -> None:
    """Refuse options that have no effect here."""
    given = vars(arguments) | {"set": arguments.settings, "slowdown": arguments.slowdown != 1.0}
    for option in options:
        if given[option]:
            raise ShoalError(f"--{option}: {why}; leave it out")


def add_data_option(parser: argparse.ArgumentParser) -> None:
    what = "allow the run to read this file or folder; hub:NAME: to read NAME on the hub with your own token (repeatable)"
    parser.add_argument("--data", action="append", default=[], metavar="PATH", help=what)


def add_token_options(parser: argparse.ArgumentParser, whose: str) -> None:
    parser.add_argument("--token", help=f"{whose} join token; safer: SHOAL_TOKEN, --token-file, or typed when asked")
    parser.add_argument("--token-file", metavar="FILE", help="a file with the join token, readable by you only")
    parser.set_defaults(key_was_announced=False)


def add_ask_option(parser: argparse.ArgumentParser) -> None:
    what = f"wait for a `yes` after showing what the run asks of this machine; otherwise leave (exit code {DECLINED})"
    parser.add_argument("--ask", action="store_true", help=what)


def agreed(summary: object, ask: bool) -> bool:
    """Show what a run asks of this machine; with `ask`, whether the user says yes."""
    sys.stderr.write(f"this run asks of this machine:\n{summary}\n")
    return not ask or ask_whether(sys.stdin.readline)


def ask_whether(read_answer: Callable[[], str]) -> bool:
    """Ask the user whether to take part."""
    sys.stderr.write("take part? [y/N] ")
    sys.stderr.flush()
    if read_answer().strip().lower() in ("y", "yes"):
        return True
    sys.stderr.write("left, as you did not agree\n")
    return False


def typed(arguments: argparse.Namespace) -> Invitation:
    """The coordinator's address and token from the options."""
    from shoal.runs.invitation import Invitation  # imported here: it loads torch, which a watcher must not

    return Invitation(*typed_parts(arguments))


def typed_parts(arguments: argparse.Namespace) -> tuple[str, str, str | None]:
    """Address, token and public key of the coordinator from the options."""
    if arguments.address and is_address(arguments.address):
        access = parse_address(arguments.address)
        password = access.password or _token(arguments) or (None if arguments.key_was_announced else database_password())
        password = password or prompt_for(_secret_of(access.user))
        return access._replace(password=password).address, "", None
    if arguments.address and Path(arguments.address).is_file():
        return _configured(arguments.address), "", None
    token = _token(arguments) or (prompt_for("the join token") if arguments.address else None)
    if not arguments.address:
        raise ShoalError("joining needs an address and a token: `shoal coordinate` prints the whole command")
    if not token:
        raise ShoalError("the join token is missing: add --token TOKEN, --token-file FILE or SHOAL_TOKEN; `shoal coordinate` prints it")
    from shoal.transports.keys import key_from_text

    return arguments.address, token, key_from_text(arguments.key) if arguments.key else None


def chosen_name(given: str | None) -> str | None:
    """The worker's name: the given one, or one typed at the terminal. None: the coordinator gives it one. Raises ShoalError."""
    if given is not None:
        if not name_of(given):
            raise ShoalError(f"--name: `{printable(given)}` cannot be a worker's name: {NAME_RULE}")
        return name_of(given)
    if rank_place() is not None or not sys.stdin.isatty():
        return None
    own = name_of(platform.node())
    while True:
        sys.stderr.write("this computer's name in the run" + (f" [{own}]: " if own else ": "))
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line.strip():
            return own or None
        if name := name_of(line):
            return name
        sys.stderr.write(f"that cannot be its name: {NAME_RULE}\n")


def _token(arguments: argparse.Namespace) -> str | None:
    """The token from a file, the command line (which other users of this machine can see) or the environment."""
    return read_token_file(arguments.token_file) if arguments.token_file else arguments.token or join_token()


def _secret_of(role: str) -> str:
    return "the class's token" if role == CLASS_ROLE else f"the token or password of `{role}`"


def prompt_for(what: str) -> str | None:
    """A secret typed at the terminal; None without a terminal."""
    if not sys.stdin.isatty():
        return None
    return getpass.getpass(f"{what}: ", stream=sys.stderr).strip() or None


def _configured(file: str) -> str:
    """The database that a configuration names."""
    (settings,) = resolve([ConfigFile(file)], []).values("transport")
    if not isinstance(settings, Postgres) or settings.host == "embedded":
        raise ShoalError(f"{file} names no database to join through: `shoal coordinate` prints the command for its workers")
    return access_of(settings).address
