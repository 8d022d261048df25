"""The door of a coordinator: where it listens, and what a worker needs to be let in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from shoal.config import Run
from shoal.config.schema.cluster import Transport
from shoal.transports import Server
from shoal.transports.connect import needs_keys, serve
from shoal.transports.keys import Keys, keys_from_secret, new_keys, new_token


class Invitation(NamedTuple):
    """What a worker needs to join."""

    address: str
    token: str
    key: str | None
    identity: str | None = None
    """The worker's own secret key, where whoever started it has made it: the processes of an island are one worker."""


class Secrets(NamedTuple):
    """What a worker needs to be let in, kept with the run so that a coordinator that comes back is the same to its workers."""

    token: str
    keys: Keys
    port: int = 0
    expected: int = 0
    """Workers the run was begun for: the data is cut into so many shards, whoever takes part later."""

    @classmethod
    def of(cls, folder: Path) -> Secrets:
        path = folder / "secrets.json"
        if path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            return cls(saved["token"], keys_from_secret(saved["secret"]), saved["port"], saved.get("expected", 0))
        return cls(new_token(), new_keys())

    def save(self, folder: Path) -> None:
        partial = folder / ".secrets.json"  # never half a file: a run that has lost its secrets has lost its workers
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"token": self.token, "secret": self.keys.secret, "port": self.port, "expected": self.expected}, file)
        os.replace(partial, folder / "secrets.json")


def listen(run: Run, transport: Transport, hosts: tuple[str, ...], folder: Path, largest: int, expected: int) -> tuple[Server, Invitation]:
    """Open the door; the same one as before, for a run that goes on. No frame may have more bytes than `largest`."""
    known = Secrets.of(folder)
    if known.port and getattr(transport, "port", None) == 0:
        transport = transport.replace(port=known.port)
    keys = known.keys if needs_keys(transport, hosts) else None
    here = getattr(transport, "port", 0)
    further = sorted({host.server_port for host in run.cluster.hosts.values() if host.server_port} - {here}) if here else []
    server = serve(transport, token=known.token, keys=keys, max_frame_bytes=largest, hosts=hosts, further_ports=further, insecure=True)
    port = int(server.address.rpartition(":")[2]) if server.address.rpartition(":")[2].isdigit() else 0
    known._replace(port=port, expected=expected).save(folder)
    return server, Invitation(server.address, known.token, keys.public if keys else None)
