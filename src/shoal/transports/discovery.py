"""Discovery on one network: servers announce themselves over multicast DNS (zeroconf), and machines that join list what is announced.

Every machine of the network can announce anything, so an announcement is a claim: its size and form are checked, and it is trusted for
nothing but where to connect. Holds: no token is in an announcement or in a query. The server that a worker connects to must have the
announced key, which a person has compared with the server's own screen.

As a program, this module announces what it reads from standard input until that closes. Packets of strangers are thus read by a process
that has no secrets.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import ShoalError
from shoal.transports import addresses
from shoal.transports.database_address import Access, is_address, split_pin
from shoal.transports.database_address import parse as parse_database
from shoal.transports.keys import fingerprint, key_from_text, key_text

if TYPE_CHECKING:
    from zeroconf import Zeroconf

COORDINATOR, NODES, CLASS = "coordinator", "server", "class"
"""What announces itself: a coordinator; a server of a model, whose layers are on several machines; the database of a class."""
SEARCH_S = 3.0
"""Duration of a search. An answer takes a second, and the question is repeated after one, in case a packet was lost."""
_SERVICE = "_shoal._tcp.local."
_VERSION = "1"
_READ_S = 2.0
_MOST_NAMES = 1000
"""The most announcements that a search reads, and its time limit for reading them."""
_MOST_HOSTS = 8
_LEAST_TOKEN = 16
_LONGEST_NAME = 40
_NAME = re.compile(rf"\w[\w .'-]{{0,{_LONGEST_NAME - 1}}}")
_NO_NAME = re.compile(r"[^\w .'-]|^\W")
_PIN = re.compile(r"[0-9a-f]{32}")
_NEVER_IN_CLEAR = "require_auth=scram-sha-256"
"""For libpq: a database that asks for the password itself is refused."""
_WORD = re.compile(r"[A-Za-z0-9_]{1,63}")


class Announcement(NamedTuple):
    """What a server announces of itself. For all others it is a claim."""

    kind: str
    name: str
    key: str
    """The server's public key, as `--key` takes it; of a database, the pin of its certificate."""
    hosts: tuple[str, ...]
    port: int
    user: str = ""
    database: str = ""
    """Only of a database: the role that workers connect as, and the database's name."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)

    def address(self, host: str) -> str:
        """The address for `shoal join`, at one of the hosts."""
        if self.kind == CLASS:
            return Access(host, self.port, self.database, self.user, options=f"pin={self.key}&{_NEVER_IN_CLEAR}").address
        return str(addresses.Address("tcp", host, self.port))


class SearchResult(NamedTuple):
    """What is announced on this network."""

    announcements: list[Announcement]
    ignored: int
    """Number of announcements that no server of this version makes."""
    complete: bool
    """Whether all announcements were read."""


def require_zeroconf() -> None:
    """Raises ShoalError where the package is missing."""
    if find_spec("zeroconf") is None:
        raise ShoalError(
            "finding servers on a network needs the package zeroconf: pip install 'shoal[discovery]'. `shoal join ADDRESS` needs nothing: "
            "the server prints the whole command"
        )


def require_long_token(token: str) -> None:
    """Raises ShoalError for a token that could be found by trying.

    A false server sees the public key of a worker that connects to it, which is derived from the token, and can compare it with those of
    all short tokens.
    """
    if len(token) < _LEAST_TOKEN:
        raise ShoalError(
            f"this token has {len(token)} characters, and a server that somebody else announces could guess it: discovery needs "
            f"{_LEAST_TOKEN} characters or more; `shoal join ADDRESS --key KEY` takes a shorter one"
        )


def announcement_of(kind: str, name: str, address: str, key: str | None, hosts: Sequence[str]) -> Announcement:
    """The announcement of a server. Raises ShoalError where other machines cannot reach it, or cannot check who it is.

    `address`: for `shoal join`; `key`: the server's public key; `hosts`: where it listens.
    """
    reached = tuple(own for host in hosts for own in _addresses_of(addresses.resolve(host)))
    if is_address(address):
        access, pin = parse_database(address), split_pin(address)[1]
        claim = Announcement(CLASS, announced_name(name), pin or "", reached, access.port, access.user, access.database)
    else:
        claim = Announcement(kind, announced_name(name), key_text(key) if key else "", reached, addresses.parse(address).port)
    if (announcement := checked(claim)) is None:
        raise ShoalError(
            f"--announce: other machines could not join this server at {', '.join(reached)}: it needs an address in a network, and a key "
            "(transport zmq, or a class's own database)"
        )
    return announcement


def _addresses_of(host: str) -> list[str]:
    """The addresses of this machine at which a server on this host is reached."""
    if not addresses.is_everywhere(host):
        return [host]
    return [own for own in addresses.local_addresses() if ":" in host or ":" not in own]


def announced_name(text: str) -> str:
    """A name as it can be announced: without characters that could be taken for another part of a line, and short."""
    return _NO_NAME.sub("-", text)[:_LONGEST_NAME].lstrip(" .'-") or "shoal"


def checked(claim: Announcement) -> Announcement | None:
    """The announcement with the hosts that other machines of a network can have; None where it is not one that a server makes."""
    hosts = sorted({host for host in claim.hosts if _is_of_a_network(host)}, key=lambda host: (":" in host, host))
    words = [claim.user, claim.database]
    if claim.kind == CLASS:
        known = _PIN.fullmatch(claim.key) and all(map(_WORD.fullmatch, words))
    else:
        known = claim.kind in (COORDINATOR, NODES) and _is_public_key(claim.key) and not any(words)
    good = known and _NAME.fullmatch(claim.name) and hosts and 0 < claim.port < 65536
    return claim._replace(hosts=tuple(hosts[:_MOST_HOSTS])) if good else None


def _is_public_key(text: str) -> bool:
    try:
        return key_text(key_from_text(text)) == text
    except ShoalError:
        return False


def _is_of_a_network(host: str) -> bool:
    """Whether another machine can have the address. (A link-local IPv6 address would also need a network card.)"""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and (address.is_link_local or address.ipv4_mapped):
        return False
    is_class_e = address.version == 4 and address.is_reserved
    return not (address.is_unspecified or address.is_loopback or address.is_multicast or is_class_e)


# --- searching ---------------------------------------------------------------------------------------------


def search(seconds: float = SEARCH_S) -> SearchResult:
    """What is announced on the networks of this machine. Raises ShoalError where it cannot be searched."""
    from zeroconf import ServiceBrowser, ServiceStateChange

    names = dict[str, None]()

    def on_change(*, name: str, state_change: ServiceStateChange, **others: object) -> None:
        if state_change is ServiceStateChange.Removed:
            names.pop(name, None)
        elif len(names) <= _MOST_NAMES:
            names[name] = None

    with _multicast() as zeroconf:
        browser = ServiceBrowser(zeroconf, _SERVICE, handlers=[on_change])
        threading.Event().wait(seconds)
        browser.cancel()
        claims, until = list[Announcement | None](), time.monotonic() + _READ_S
        for name in list(names)[:_MOST_NAMES]:
            if time.monotonic() > until:
                break
            claims.append(_read(zeroconf, name))
    found = list(dict.fromkeys(claim for claim in claims if claim is not None))
    return SearchResult(found, claims.count(None), complete=len(claims) == len(names))


def _read(zeroconf: Zeroconf, name: str) -> Announcement | None:
    from zeroconf import Error, ServiceInfo

    try:
        info = ServiceInfo(_SERVICE, name)
    except Error:
        return None
    if not info.load_from_cache(zeroconf):
        return None
    text = {key.decode("utf-8", "replace"): (value or b"").decode("utf-8", "replace") for key, value in info.properties.items()}
    if text.get("version") != _VERSION:
        return None
    kind, shown, key, user, database = (text.get(field, "") for field in ("kind", "name", "key", "user", "database"))
    return checked(Announcement(kind, shown, key, tuple(info.parsed_addresses()), info.port or 0, user, database))


@contextlib.contextmanager
def _multicast() -> Iterator[Zeroconf]:
    from zeroconf import Zeroconf

    logging.getLogger("zeroconf").propagate = False  # what it logs quotes packets of strangers
    try:
        zeroconf = Zeroconf()
    except OSError as problem:
        raise ShoalError(f"this machine cannot send multicast DNS in its networks: {problem}") from None
    try:
        yield zeroconf
    finally:
        zeroconf.close()


# --- announcing --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def announcing(announcement: Announcement) -> Iterator[None]:
    """Announce a server until the context ends. Raises ShoalError.

    The record's name and its host name are random: they cannot collide with those of another server, or with this machine's own.
    """
    from zeroconf import ServiceInfo

    fields = announcement._asdict() | {"version": _VERSION}
    properties = {name: fields[name] for name in ("version", "kind", "name", "key", "user", "database") if fields[name]}
    label = secrets.token_hex(16)
    record = ServiceInfo(
        _SERVICE,
        f"{label}.{_SERVICE}",
        port=announcement.port,
        parsed_addresses=list(announcement.hosts),
        properties=properties,
        server=f"{label}.local.",
    )
    with _multicast() as zeroconf:
        # The library need not ask whether the name is free, which another machine could deny for ever
        zeroconf.register_service(record, cooperating_responders=True)
        try:
            yield
        finally:
            zeroconf.unregister_service(record)


def main() -> None:
    """Announce what the first line of standard input says until standard input closes. The answer is one line: an error, or none."""
    fields: dict[str, Any] = json.loads(sys.stdin.readline())
    try:
        with announcing(Announcement(**fields | {"hosts": tuple(fields["hosts"])})):
            _answer("")
            sys.stdin.read()
    except ShoalError as problem:
        _answer(str(problem))


def _answer(error: str) -> None:
    sys.stdout.write(json.dumps({"error": error}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
