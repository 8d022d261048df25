"""Discovery on one network: `--announce` of servers, and the choice of a server by `shoal join` without an address."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shoal.cli.main import print_log
from shoal.errors import ShoalError
from shoal.transports.addresses import is_listening
from shoal.transports.database_address import is_address, parse

if TYPE_CHECKING:
    from shoal.runs.invitation import Invitation
    from shoal.transports.discovery import Announcement, SearchResult

_MOST_SHOWN = 20
_LONGEST_ANSWER = 100


def add_announce_option(parser: argparse.ArgumentParser) -> None:
    what = "announce this server on its networks: `shoal join` without an address finds it there (needs shoal[discovery])"
    parser.add_argument("--announce", action="store_true", help=what)


@contextmanager
def announced(kind: str, name: str, invitation: Invitation, hosts: Sequence[str]) -> Iterator[None]:
    """Announce a server while workers can join, and print the fingerprint of its key. Raises ShoalError."""
    from shoal.launch import side_processes
    from shoal.transports.discovery import announcement_of, require_long_token

    database = is_address(invitation.address)
    require_long_token((parse(invitation.address).password if database else invitation.token) or "")
    announcement = announcement_of(kind, name, invitation.address, invitation.key, hosts)
    with side_processes.announced(announcement, print_log):
        print(
            f"announced on this network as {announcement.name}: `shoal join` without an address finds it, and asks for the token\n"
            f"the fingerprint of its key, to be compared there: {announcement.fingerprint}",
            flush=True,
        )
        yield


# --- `shoal join` without an address -----------------------------------------------------------------------


def find_server(arguments: argparse.Namespace) -> bool:
    """Set the address and the key of the announced server that the user chooses, or that has the key of `--key`.

    Returns whether the user agreed that the key is that server's. Raises ShoalError where there is no such server.
    """
    from shoal.transports.discovery import CLASS, NODES, SEARCH_S, require_zeroconf, search

    require_zeroconf()
    sys.stderr.write(f"no address was given: looking for coordinators and servers on this network for {SEARCH_S:.0f} seconds\n")
    result = search()
    found = [one for one in result.announcements if arguments.key in (None, one.key) and (one.kind == NODES or not arguments.node)]
    if not found:
        raise ShoalError(_nothing_found(result, arguments))
    if arguments.key and len(found) == 1:
        chosen = found[0]
    elif not sys.stdin.isatty():
        raise ShoalError(
            f"which one? Without a terminal, name it: `shoal join ADDRESS --key KEY`, or --key KEY alone, as its own screen shows them. "
            f"Announced are:\n{_table(found, result.complete)}"
        )
    elif (answer := _choose(found, result.complete, ask_key=arguments.key is None)) is None:
        return False
    else:
        chosen = answer
    if chosen.kind == NODES and arguments.ask:
        raise ShoalError("--ask: a machine that holds layers of a server's model cannot be asked; leave it out")
    arguments.address, arguments.node = _reached_address(chosen), chosen.kind == NODES
    arguments.key, arguments.key_was_announced = None if chosen.kind == CLASS else chosen.key, arguments.key is None
    sys.stderr.write(f"joining {chosen.name} at {arguments.address}\n")
    return True


def _nothing_found(result: SearchResult, arguments: argparse.Namespace) -> str:
    what = "server with --node" if arguments.node else "coordinator or server"
    others = f" ({len(result.announcements)} others are)" if result.announcements else ""
    strange = f"; {result.ignored} announcements are not of this version of Shoal" if result.ignored else ""
    return (
        f"no {what} {'with this key ' if arguments.key else ''}is announced on this network{others}{strange}. Start it with --announce, "
        "in the same network, or join with the address: `shoal coordinate` prints the whole command"
    )


def _choose(found: Sequence[Announcement], complete: bool, *, ask_key: bool) -> Announcement | None:
    """The server that the user names, whose key the user has compared; None: the user leaves."""
    sys.stderr.write(f"every machine of this network can announce anything; this is what is announced:\n{_table(found, complete)}\n")
    chosen = found[0]
    if len(found) > 1:
        number = _answer(f"which one? (1 to {min(len(found), _MOST_SHOWN)}, or nothing to leave) ")
        if not number.isdecimal() or not 1 <= int(number) <= min(len(found), _MOST_SHOWN):
            sys.stderr.write("left, as you named none of them\n")
            return None
        chosen = found[int(number) - 1]
    if not ask_key:
        return chosen
    sys.stderr.write(f"compare the fingerprint of its key with the one on the server's own screen: {chosen.fingerprint}\n")
    answer = _answer("are they the same? (yes, no, or type the one on its screen) ").lower()
    if answer in ("yes", "y", chosen.fingerprint):
        return chosen
    sys.stderr.write("left, as you did not say that the fingerprints are the same\n")
    return None


def _answer(question: str) -> str:
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline(_LONGEST_ANSWER).strip()


def _table(found: Sequence[Announcement], complete: bool) -> str:
    """A line for each announcement. Its name stands last, so that it cannot be taken for another column."""
    rows = [
        f"{number:>4}  {one.fingerprint}  {one.kind:<11}  {one.port:>5}  {', '.join(one.hosts[:3]):<32}  {one.name}"
        for number, one in enumerate(found[:_MOST_SHOWN], 1)
    ]
    head = f"      {'fingerprint of key':<19}  {'kind':<11}  {'port':>5}  {'addresses':<32}  name"
    more = [f"      and {len(found) - _MOST_SHOWN} more: --key KEY chooses one of them"] if len(found) > _MOST_SHOWN else []
    cut = [] if complete else ["      there are more than were read: join with the address that the server's own screen shows"]
    return "\n".join([head, *rows, *more, *cut])


def _reached_address(chosen: Announcement) -> str:
    """The server's address at the first of its hosts that this machine reaches. Raises ShoalError where it reaches none."""
    for host in chosen.hosts:
        if is_listening(host, chosen.port):
            return chosen.address(host)
    shown = ", ".join(chosen.hosts)
    raise ShoalError(f"{chosen.name} is announced at {shown}, port {chosen.port}, and does not answer: may this machine reach it?")
