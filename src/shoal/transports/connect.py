"""The right transport, by the kind in the configuration or the scheme of an address.

Each is imported when it is chosen: nobody waits for ZeroMQ who does not use it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config.schema.cluster import InProcess, Postgres, Transport, XmlRpc, Zmq
from shoal.errors import ShoalError
from shoal.transports import addresses
from shoal.transports.interface import Client, Server
from shoal.transports.keys import Keys


def listening_hosts(settings: Transport, hosts: Sequence[str] = ()) -> list[str]:
    """Where a server listens: as configured, else on the addresses its workers use, else for this machine alone."""
    configured = getattr(settings, "host", None)
    return [configured] if configured else [*dict.fromkeys(hosts)] or ["127.0.0.1"]


def needs_keys(settings: Transport, hosts: Sequence[str] = ()) -> bool:
    """Whether other machines can reach the server, so that what travels must be encrypted. (A database has keys of its own.)"""
    return not isinstance(settings, (InProcess, Postgres)) and not all(map(addresses.is_loopback, listening_hosts(settings, hosts)))


def serve(
    settings: Transport,
    *,
    token: str,
    keys: Keys | None,
    max_frame_bytes: int,
    hosts: Sequence[str] = (),
    further_ports: Sequence[int] = (),
    insecure: bool = False,
) -> Server:
    """A server as configured. With `keys` everything is encrypted; `insecure` lets XML-RPC, which cannot be, leave this machine."""
    if isinstance(settings, Postgres):
        from shoal.transports.postgres import PostgresServer
        from shoal.transports.postgres.line import conninfo_of

        return PostgresServer(conninfo_of(settings), max_frame_bytes=max_frame_bytes, poll_interval_s=settings.poll_interval_s)
    if isinstance(settings, InProcess):
        from shoal.transports.in_process import InProcessServer

        return InProcessServer(token=token, max_frame_bytes=max_frame_bytes)
    listening = listening_hosts(settings, hosts)
    if isinstance(settings, XmlRpc):
        if further_ports:
            raise ShoalError("XML-RPC listens on one port; ports by host need the transport zmq")
        from shoal.transports.xmlrpc import XmlRpcServer

        return XmlRpcServer(listening[0], settings.port, token=token, max_frame_bytes=max_frame_bytes, insecure=insecure)
    if not isinstance(settings, Zmq):
        raise ShoalError(f"transport.kind {settings.kind} has no server")
    from shoal.transports.zeromq import ZmqServer

    secret_key = keys.secret if keys else None
    return ZmqServer(
        listening, settings.port, token=token, secret_key=secret_key, max_frame_bytes=max_frame_bytes, further_ports=further_ports
    )


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
    if scheme == "tcp":
        from shoal.transports.zeromq import ZmqClient

        return ZmqClient(address, token=token, server_key=server_key, max_frame_bytes=max_frame_bytes, local=local)
    if scheme == "http":
        from shoal.transports.xmlrpc import XmlRpcClient

        return XmlRpcClient(address, token=token, max_frame_bytes=max_frame_bytes, insecure=insecure)
    if scheme in ("postgresql", "postgres"):
        from shoal.transports.postgres import PostgresClient

        return PostgresClient(address, max_frame_bytes=max_frame_bytes)
    if scheme == "in-process":
        from shoal.transports.in_process import InProcessClient

        return InProcessClient(address, token=token, max_frame_bytes=max_frame_bytes)
    raise ShoalError(f"`{address}` is not an address of a coordinator: tcp://…, http://…, postgresql://… or in-process://… is expected")
