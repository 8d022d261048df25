"""The right transport, by the kind in the configuration or the scheme of an address.

Each is imported when it is chosen, so a run does not wait for the import of a transport that it does not use.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config.schema.cluster import Transport
from shoal.errors import ShoalError
from shoal.transports import addresses
from shoal.transports.interface import Client, ConnectOptions, ListenOptions, Server


def listening_hosts(settings: Transport, hosts: Sequence[str] = ()) -> list[str]:
    """Where a server listens: as configured, else on the addresses its workers use, else for this machine alone."""
    configured = getattr(settings, "host", None)
    return [configured] if configured else [*dict.fromkeys(hosts)] or ["127.0.0.1"]


def needs_keys(settings: Transport, hosts: Sequence[str] = ()) -> bool:
    """Whether other machines can reach the server, so that what travels must be encrypted. (A database has keys of its own.)"""
    return not settings.own_keys and not all(map(addresses.is_loopback, listening_hosts(settings, hosts)))


def serve(settings: Transport, options: ListenOptions) -> Server:
    """A server as configured, which listens on `options.hosts` if the settings name no host."""
    return settings.builder().serve(settings, options._replace(hosts=listening_hosts(settings, options.hosts)))


def connect(options: ConnectOptions) -> Client:
    """A client for a server's address. Nothing is sent before the first call. (A database knows its users: the token is not for it.)"""
    address = options.address
    scheme = address.partition("://")[0]
    found = next((kind for kind in Transport.kinds.values() if scheme in kind.schemes), None)
    if found is None:
        expected = ", ".join(f"{kind.schemes[0]}://…" for kind in Transport.kinds.values() if kind.schemes)
        raise ShoalError(f"`{address}` is not an address of a coordinator: one of {expected} is expected")
    return found.builder().connect(options)
