"""Servers from plain arguments instead of settings and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.config.schema.cluster import Zmq
from shoal.transports.interface import Guest, ListenOptions
from shoal.transports.keys import Keys
from shoal.transports.request_rate import Rate
from shoal.transports.xmlrpc import XmlRpcServer
from shoal.transports.zeromq import ZmqServer


def zmq_server(
    *hosts: str,
    port: int = 0,
    token: str,
    secret_key: str | None = None,
    max_frame_bytes: int,
    rate: Rate = Rate(),  # noqa: B008 - a tuple
    guests: Callable[[], Sequence[Guest]] = tuple,
    **settings: Any,
) -> ZmqServer:
    keys = None if secret_key is None else Keys("", secret_key)
    options = ListenOptions(hosts or ("127.0.0.1",), token, keys, max_frame_bytes, guests=guests)
    return ZmqServer(Zmq(port=port, **settings), options, rate)


def xmlrpc_server(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str,
    max_frame_bytes: int,
    insecure: bool = False,
    rate: Rate = Rate(),  # noqa: B008 - a tuple
) -> XmlRpcServer:
    return XmlRpcServer(port, ListenOptions([host], token, None, max_frame_bytes, insecure=insecure), rate)
