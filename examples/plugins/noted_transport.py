"""A transport: ZeroMQ that writes down who asked how much."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shoal.config.schema.cluster import Zmq
from shoal.plugins import NonNegativeInt, Transport, builds
from shoal.transports import Client, Request, Server, zeromq
from shoal.transports.interface import ClientOptions, ServerOptions


class Noted(Transport):
    """ZeroMQ that adds a line to a file for every request."""

    kind: Literal["noted"] = "noted"
    schemes = ("noted",)
    host: str | None = None
    """Address the coordinator listens on; null: as for zmq."""
    port: NonNegativeInt = 0
    """0 lets the system choose."""
    file: str = "requests.txt"
    """Where the lines go."""


@builds(Noted)
class NotedTransport:
    """`serve` makes the coordinator's side, `connect` a worker's. Addresses begin with one of the schemes."""

    @staticmethod
    def serve(settings: Noted, place: ServerOptions) -> Server:
        server = zeromq.serve(Zmq(port=settings.port), place)
        file, poll = Path(settings.file), server.poll

        def noting(timeout_s: float) -> list[Request]:
            requests = poll(timeout_s)
            with file.open("a", encoding="utf-8") as lines:
                lines.writelines(f"{request.message.header['kind']}\n" for request in requests)
            return requests

        server.poll, server.address = noting, server.address.replace("tcp://", "noted://")  # type: ignore[method-assign]
        return server

    @staticmethod
    def connect(call: ClientOptions) -> Client:
        return zeromq.connect(call._replace(address=call.address.replace("noted://", "tcp://")))
