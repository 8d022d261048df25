"""postgres.json in a run's folder: the address and password of the run's own database, and who runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.files import JsonFormat
from shoal.launch.processes import start_time, still_runs
from shoal.transports.addresses import is_loopback, resolve
from shoal.transports.database_address import Access

FILE = "postgres.json"


class ConnectionFile(NamedTuple):
    """The saved connection settings, so that a resumed run has the same address."""

    host: str
    port: int
    database: str
    user: str
    password: str
    owner: tuple[int, float | None] | None = None
    """The process that runs the server, and when that process began."""
    inner_port: int = 0
    """Where a front that speaks TLS listens at `host` and `port`: the port of the server itself, on this machine only."""

    @classmethod
    def of(cls, folder: Path) -> ConnectionFile | None:
        saved = _FORMAT.read(folder / FILE)
        return None if saved is None else cls(**saved | {"owner": tuple(saved["owner"]) if saved["owner"] else None})

    def save(self, folder: Path) -> None:
        _FORMAT.write(folder / FILE, self._asdict(), indent=2)

    @property
    def access(self) -> Access:
        """How to connect from this machine."""
        host = resolve(self.host) if is_loopback(self.host) else "127.0.0.1"
        return Access(host, self.inner_port or self.port, self.database, self.user, self.password, "sslmode=disable")


_FORMAT = JsonFormat("database connection file", 1, ConnectionFile._fields, private=True)


def own_process() -> tuple[int, float | None]:
    """The number of this process and when it began: a later process with the same number is not mistaken for it."""
    return os.getpid(), start_time(os.getpid())


def refuse_a_second_owner(folder: Path, known: ConnectionFile | None) -> None:
    """One process runs a folder's server at a time."""
    if known is not None and known.owner is not None and still_runs(*known.owner):
        raise ShoalError(f"the database in {folder} belongs to process {known.owner[0]}, which still runs: end that run first")
