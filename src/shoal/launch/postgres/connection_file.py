"""postgres.json in a run's folder: the address and password of the run's own database, and who runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.files import JsonFormat
from shoal.launch.postgres.programs import psutil_module
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
    owner: tuple[int, float] | None = None
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


def own_process() -> tuple[int, float]:
    """The number of this process and when it began: a later process with the same number is not mistaken for it."""
    return os.getpid(), psutil_module().Process().create_time()


def refuse_a_second_owner(folder: Path, known: ConnectionFile | None) -> None:
    """One process runs a folder's server at a time."""
    if known is None or known.owner is None:
        return
    psutil = psutil_module()
    pid, began = known.owner
    try:
        process = psutil.Process(pid)
        alive = abs(process.create_time() - began) < 2.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        alive = False
    if alive:
        raise ShoalError(f"the database in {folder} belongs to process {pid}, which still runs: end that run first")
