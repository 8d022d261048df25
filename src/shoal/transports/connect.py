"""The right transport, by the kind in the configuration or the scheme of an address.

Each is imported when it is chosen, so a run does not wait for the import of a transport that it does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.config.schema.cluster import Transport
from shoal.errors import ShoalError
from shoal.transports import addresses
from shoal.transports.interface import Client, ConnectOptions, Guest, ListenOptions, Server
from shoal.transports.keys import Keys


def listening_hosts(settings: Transport, hosts: Sequence[str] = ()) -> list[str]:
    """Where a server listens: as configured, else on the addresses its workers use, else for this machine alone."""
    configured = getattr(settings, "host", None)
    return [configured] if configured else [*dict.fromkeys(hosts)] or ["127.0.0.1"]


def needs_keys(settings: Transport, hosts: Sequence[str] = ()) -> bool:
    """Whether other machines can reach the server, so that what travels must be encrypted. (A database has keys of its own.)"""
    return not settings.own_keys and not all(map(addresses.is_loopback, listening_hosts(settings, hosts)))


def serve(
    settings: Transport,
    *,
    token: str,
    keys: Keys | None,
    max_frame_bytes: int,
    hosts: Sequence[str] = (),
    further_ports: Sequence[int] = (),
    insecure: bool = False,
    guests: Callable[[], Sequence[Guest]] = tuple,
) -> Server:
    """A server as configured. With `keys` everything is encrypted; `insecure` lets XML-RPC, which cannot be, leave this machine."""
    options = ListenOptions(listening_hosts(settings, hosts), token, keys, max_frame_bytes, further_ports, insecure, guests)
    server: Server = settings.builder().serve(settings, options)
    return server


def connect(
    address: str,
    *,
    token: str,
    server_key: str | None = None,
    max_frame_bytes: int,
    insecure: bool = False,
    local: str | None = None,
) -> Client:
    """A client for a server's address. Nothing is sent before the first call. (A database knows its users: the token is not for it.)"""
    scheme = address.partition("://")[0]
    found = next((kind for kind in Transport.kinds.values() if scheme in kind.schemes), None)
    if found is None:
        expected = ", ".join(f"{kind.schemes[0]}://…" for kind in Transport.kinds.values() if kind.schemes)
        raise ShoalError(f"`{address}` is not an address of a coordinator: one of {expected} is expected")
    client: Client = found.builder().connect(ConnectOptions(address, token, server_key, max_frame_bytes, insecure, local))
    return client
