"""A transport: ZeroMQ that writes down the kind of every request."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shoal.plugins import Client, ConnectOptions, ListenOptions, NonNegativeInt, Request, Server, Transport, Zmq, builds, zeromq


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
    def serve(settings: Noted, options: ListenOptions) -> Server:
        server = zeromq.serve(Zmq(port=settings.port), options)
        file, poll = Path(settings.file), server.poll

        def noting(timeout_s: float) -> list[Request]:
            requests = poll(timeout_s)
            with file.open("a", encoding="utf-8") as lines:
                lines.writelines(f"{request.message.header['kind']}\n" for request in requests)
            return requests

        server.poll, server.address = noting, server.address.replace("tcp://", "noted://")  # type: ignore[method-assign]
        return server

    @staticmethod
    def connect(options: ConnectOptions) -> Client:
        return zeromq.connect(options._replace(address=options.address.replace("noted://", "tcp://")))
