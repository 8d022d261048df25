"""Network addresses: parse and resolve them, find those of this machine, and free ports."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import re
import socket
import struct
import sys
from typing import NamedTuple
from urllib.parse import urlsplit

from shoal.errors import ShoalError

# Systems give outgoing connections a port above these, so a coordinator that comes back finds its own port free.
LASTING_PORTS = range(20_000, 32_000)
_PUBLIC = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,252}[a-z0-9])?|(?=.*:)[0-9a-f:.]{2,45}")
"""A host name, or an address of IPv4 or IPv6."""
_DOCUMENTATION = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation, which are elsewhere for every machine."""


class Address(NamedTuple):
    """`scheme://host:port`, taken apart."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{bracketed(self.host)}:{self.port}"


def parse(address: str) -> Address:
    try:
        parts = urlsplit(address)
        if parts.hostname and parts.port:
            return Address(parts.scheme, parts.hostname, parts.port)
    except ValueError:
        pass
    raise ShoalError(f"`{address}` is not an address: something like tcp://192.168.1.10:65432 is expected")


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def resolve(host: str) -> str:
    """A name as a number, IPv4 first; numbers and `*` stay."""
    if host == "*":
        return "0.0.0.0"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as problem:
        raise ShoalError(f"this machine cannot resolve the host name `{host}`: {problem}") from None
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return ipaddress.ip_address(resolve(host)).is_loopback


def is_everywhere(host: str) -> bool:
    return ipaddress.ip_address(host).is_unspecified


def is_listening(host: str, port: int) -> bool:
    """Whether a program accepts connections there."""
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def free_port(host: str, port: int = 0) -> int | None:
    """A free port of this host: `port` itself, or None if it is taken; for 0 one that will be free again after a restart."""
    numeric = resolve(host)
    if port:
        return _if_free(numeric, port)
    tries = random.SystemRandom().sample(LASTING_PORTS, 20)
    return next(filter(None, (_if_free(numeric, candidate) for candidate in tries)), None) or _if_free(numeric, 0)


def _if_free(numeric: str, port: int) -> int | None:
    with socket.socket(socket.AF_INET6 if ":" in numeric else socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name == "posix":  # elsewhere it would mean that a port may be shared
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((numeric, port))
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                return None
            raise ShoalError(f"this machine cannot listen on {bracketed(numeric)}:{port}: {problem.strerror}") from None
        return int(probe.getsockname()[1])


def local_addresses() -> list[str]:
    """Addresses under which others on the network probably reach this machine, the likeliest first; 127.0.0.1 where it has no other."""
    found = dict.fromkeys([*_addresses_of_routes(), *_addresses_of_interfaces()])
    useful = [address for address in found if not is_everywhere(address) and not is_loopback(address)]
    return sorted(useful, key=lambda address: ipaddress.ip_address(address).is_link_local) or ["127.0.0.1"]


def _addresses_of_routes() -> list[str]:
    """The addresses of this machine on its routes out of the network, if it has any."""
    return [own for own in map(own_address_towards, _DOCUMENTATION) if own]


def _addresses_of_interfaces() -> list[str]:
    """The addresses of this machine's network cards, as far as the system reports them; also without a route out of the network."""
    with contextlib.suppress(OSError):
        named = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
        return [*_cards().values(), *named]
    return [*_cards().values()]


def own_address_towards(peer: str) -> str | None:
    """The address of this machine from which it would reach a peer; None if there is no route. Connecting the socket sends nothing."""
    with contextlib.suppress(OSError, ShoalError):
        numeric = resolve(peer)
        with socket.socket(socket.AF_INET6 if ":" in numeric else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((numeric, 9))
            return str(probe.getsockname()[0])
    return None


def interface_of(peer: str) -> str | None:
    """The network card that leads to a peer; None where the system does not tell."""
    own = own_address_towards(peer)
    with contextlib.suppress(OSError):
        return next((name for name, address in _cards().items() if address == own), None)
    return None


def _cards() -> dict[str, str]:
    """The network cards and their IPv4 addresses. Windows knows the addresses by the machine's name."""
    request = {"linux": 0x8915, "darwin": 0xC0206921}.get(sys.platform)  # SIOCGIFADDR
    found: dict[str, str] = {}
    if request is None:
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # a card without an address
                answer = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def to_tell(host: str) -> str:
    """The address that workers should use for a server that listens on this host."""
    return local_addresses()[0] if is_everywhere(host) else host


class PublicAddress(NamedTuple):
    """The host, and perhaps the port, under which machines elsewhere reach a server that listens on another one: behind NAT, in a cloud."""

    host: str
    port: int | None = None
    """None: the port on which the server listens."""

    @classmethod
    def parse(cls, given: str) -> PublicAddress:
        """Parse HOST[:PORT]. Raises ShoalError."""
        whole = f"[{given}]" if given.count(":") > 1 and "[" not in given else given
        try:
            parts = urlsplit(f"//{whole}")
            if parts.hostname and parts.netloc == whole and "@" not in whole and _PUBLIC.fullmatch(parts.hostname) and parts.port != 0:
                return cls(parts.hostname, parts.port)
        except ValueError:
            pass
        raise ShoalError(f"--public-address: `{given}` is not HOST or HOST:PORT, such as shoal.example.org:65432 or [2001:db8::5]:65432")

    @property
    def text(self) -> str:
        return bracketed(self.host) + (f":{self.port}" if self.port else "")
