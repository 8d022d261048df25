"""Addresses of machines: which are this one, and what to write down for others."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from shoal.errors import ShoalError

_DOCUMENTATION = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


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
        raise ShoalError(f"`{host}` is not known here as the name of a machine: {problem}") from None
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return ipaddress.ip_address(resolve(host).partition("%")[0]).is_loopback


def is_everywhere(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_unspecified


def local_addresses() -> list[str]:
    """Addresses under which others on the network probably reach this machine, the likeliest first.

    A datagram socket "connected" to an address reserved for documentation learns which of our addresses it would use, and sends nothing.
    """
    found = []
    for family, elsewhere in _DOCUMENTATION:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                found.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    return [address for address in found if not is_everywhere(address)] or ["127.0.0.1"]


def to_tell(host: str) -> str:
    """What to tell workers when the server listens on this host."""
    return local_addresses()[0] if is_everywhere(host) else host
