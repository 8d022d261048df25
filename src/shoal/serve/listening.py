"""Where a server listens."""

from __future__ import annotations

import ipaddress
import socket

from shoal.errors import ShoalError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ShoalError where another program does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ShoalError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port") from None
    return made
