"""A PostgreSQL server of the run's own, in the run's folder, that needs no set-up and ends with the run.

postgres/       its data
postgres.json   its address and password, so that a run that is resumed has the same
postgres.log    what it said
postgres.crt    the certificate of the front that speaks TLS, where other machines are let in, and its key

What was committed survives `kill -9` of the server: nothing of its durability is traded for speed. The process that starts it owns it:
when the owner ends for any reason, the server ends too (see supervisor.py).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from shoal.errors import ShoalError
from shoal.files import make_folder, open_file
from shoal.launch.forkserver import OpenedProcess, write_line
from shoal.launch.local import last_line
from shoal.launch.postgres import data_folder, supervisor
from shoal.launch.postgres.certificate import Certificate, certificate_of
from shoal.launch.postgres.connection_file import FILE, ConnectionFile, own_process, refuse_a_second_owner
from shoal.launch.postgres.programs import Programs, programs_for
from shoal.launch.waiting import wait_or_kill, wait_until
from shoal.transports import tls_proxy
from shoal.transports.addresses import bracketed, free_port, is_listening, is_loopback, resolve
from shoal.transports.database_address import CLASS_ROLE, Access

_START_S = 120.0
_STOP_S = 60.0
_PASSING_S = 10.0
_FRONT_S = 30.0
_POLL_INTERVAL_S = 0.02
MOST_OUTSIDE = 180
"""Connections that the front lets in at a time: the server's, less those that the run itself needs."""
_PASSING = ("is still in use", "already exists", "could not bind")
"""What a server complains of while an earlier one is still shutting down."""


class EmbeddedPostgres:
    """A server on `folder/postgres`, while the context lasts. Port 0 is a free one, and the same again when the run is resumed."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        database: str = "shoal",
        user: str = "shoal",
        password: str | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self.data, self.log = self.folder / "postgres", self.folder / "postgres.log"
        self._port, self._password = port, password
        self._saved = ConnectionFile(host, port, database, user, password or "")
        self._keeper: OpenedProcess | None = None
        self._certificate: Certificate | None = None

    def access_from(self, host: str) -> Access:
        """How other machines connect, which reach this one as `host`: with TLS, and the certificate named."""
        outside = self.access._replace(host=host, port=self._saved.port)
        return outside._replace(options=f"pin={self._certificate.pin}") if self._certificate is not None else outside

    @property
    def access(self) -> Access:
        """How to connect from this machine, as the database's owner. Other machines need roles of their own."""
        return self._saved.access

    @property
    def pid(self) -> int | None:
        """The server's process, while it runs."""
        return data_folder.running_server(self.data)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server, the first time on an empty database. Raises ShoalError."""
        make_folder(self.folder)
        programs = programs_for(self.data)
        import_module("shoal.transports.postgres.access")  # raises ShoalError if the driver is missing, before anything is started
        known = ConnectionFile.of(self.folder)
        refuse_a_second_owner(self.folder, known)
        if known is not None and data_folder.is_made(self.data) and known.user != self._saved.user:
            raise ShoalError(
                f"the database in {self.folder} belongs to `{known.user}`, not to `{self._saved.user}`: set transport.user back"
            )
        data_folder.end_leftover_server(self.data)
        self._saved = self._saved._replace(password=self._present_password(known), port=self._free_port(known), owner=own_process())
        if not is_loopback(self._saved.host):
            self._certificate = certificate_of(self.folder)
            self._saved = self._saved._replace(inner_port=free_port("127.0.0.1") or 0)
        self._saved.save(self.folder)  # first, since the database cannot be opened without it
        try:
            if data_folder.is_made(self.data):
                data_folder.check_release(programs)
            else:
                data_folder.make(programs, self._saved)
            self._launch(programs)
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def was_killed(self) -> bool:
        """Whether the server has ended without having been closed."""
        return self._keeper is not None and self._keeper.poll() is not None

    def restart(self) -> None:
        """Start the server again after it was killed. Raises ShoalError."""
        self._stop_keeper()
        data_folder.end_leftover_server(self.data)
        self._launch(programs_for(self.data))

    def close(self) -> None:
        """Shut the server down, and disconnect all clients."""
        self._stop_keeper()
        self._keeper = None
        if self._saved.owner is not None:
            self._saved = self._saved._replace(owner=None)
            self._saved.save(self.folder)

    # --- on the way there --------------------------------------------------------------------------

    def _present_password(self, known: ConnectionFile | None) -> str:
        """The password that the server has now; `_open` changes it if another one is wanted."""
        if known is not None and data_folder.is_made(self.data):
            return known.password
        if self._password:
            return self._password
        if data_folder.is_made(self.data):
            raise ShoalError(f"{self.folder / FILE} is gone, and with it the database's password: set DB_PASSWORD if you know it")
        return secrets.token_urlsafe(24)

    def _free_port(self, known: ConnectionFile | None) -> int:
        """The port that was asked for, else the one of the last start, else any free one."""
        host, wanted = self._saved.host, self._port or (known.port if known else 0)
        port = free_port(host, wanted)
        if port is None and not self._port and is_loopback(host):
            port = free_port(host)  # no other machine has received the old port
        if port is None:
            raise ShoalError(f"port {wanted} of {bracketed(host)} is taken: end what uses it, or choose another with transport.port")
        return port

    def _launch(self, programs: Programs) -> None:
        """Start the server, and wait until it answers."""
        command = data_folder.configure(programs, self._saved)
        began = time.monotonic()
        while True:
            spoken = self.log.stat().st_size if self.log.exists() else 0
            self._keeper = _start_keeper(programs, command, self.log, self._front(programs))
            if self._is_ready(began + _START_S):
                self._wait_for_front()
                return
            said = _complaint(self.log, spoken)
            if not any(words in said for words in _PASSING) or time.monotonic() > began + _PASSING_S:
                raise ShoalError(f"the run's PostgreSQL does not start: {said} (see {self.log})")
            time.sleep(0.2)

    def _front(self, programs: Programs) -> dict[str, Any] | None:
        """Configuration of the TLS proxy; None where only this machine connects."""
        saved, made = self._saved, self._certificate
        if made is None:
            return None
        files = {"certificate": str(made.certificate), "key": str(made.key), "program": tls_proxy.__file__}
        where = {"host": resolve(saved.host), "port": saved.port, "server_port": saved.inner_port}
        roles = {"forbidden_roles": [saved.user], "passing_roles": [CLASS_ROLE]}
        return files | where | roles | {"most": MOST_OUTSIDE, "user": programs.user}

    def _wait_for_front(self) -> None:
        """Wait until other machines can reach the server. Raises ShoalError where the TLS proxy does not start."""
        host, port = resolve(self._saved.host), self._saved.port
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        if self._certificate is not None and not wait_until(lambda: is_listening(local, port), _FRONT_S, _POLL_INTERVAL_S):
            raise ShoalError(f"the front of the run's PostgreSQL does not listen at {bracketed(host)}:{port} (see {self.log})")

    def _is_ready(self, until: float) -> bool:
        """Wait for the server; False if it ended, or takes too long."""
        keeper = self._keeper
        assert keeper is not None
        wait_until(
            lambda: keeper.poll() is not None or data_folder.is_ready(self.data, keeper.pid), until - time.monotonic(), _POLL_INTERVAL_S
        )
        if keeper.poll() is None and data_folder.is_ready(self.data, keeper.pid):
            return True
        self._stop_keeper()
        return False

    def _stop_keeper(self) -> None:
        """Close the keeper's input and wait: it then shuts the server down."""
        if self._keeper is None:
            return
        self._keeper.stdin.close()
        wait_or_kill(self._keeper, _STOP_S)

    def _open(self) -> None:
        """See that the password is the wanted one, and that there is a database."""
        from shoal.transports.postgres.access import connect, create_database, set_password

        wanted = self._password or self._saved.password
        if wanted != self._saved.password:
            maintenance = self.access._replace(database="postgres")
            try:
                connection = connect(maintenance)
            except ShoalError:  # a run that was killed changed the password before it could save it
                connection = connect(maintenance._replace(password=wanted))
            with connection:
                set_password(connection, self._saved.user, wanted)
            self._saved = self._saved._replace(password=wanted)
            self._saved.save(self.folder)
        create_database(self.access)


@contextmanager
def database_of(folder: Path) -> Iterator[tuple[Access, str]]:
    """The database in a run's folder, and the address its server listens on: as it runs, or started for as long as it is needed."""
    known = ConnectionFile.of(folder)
    if known is None:
        raise ShoalError(f"{folder} holds no database: only a run with `host: embedded` has one of its own")
    if data_folder.running_server(folder.absolute() / "postgres") is not None:
        yield known.access, known.host
        return
    settings = known._asdict()
    del settings["owner"], settings["inner_port"]
    with EmbeddedPostgres(folder, **settings) as server:
        yield server.access, known.host


def _start_keeper(programs: Programs, command: list[str], log: Path, front: dict[str, Any] | None) -> OpenedProcess:
    """Start the keeper in a session of its own: Ctrl-C at the terminal must reach the run only, which still needs its database to stop."""
    order = {"command": command, "cwd": str(programs.data), "user": programs.user, "front": front, "log": str(log)}
    order["stop"] = programs.command("pg_ctl", "stop", "--mode", "fast")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}
    with open_file(log, "ab", private=True) as file:
        keeper = OpenedProcess(
            [sys.executable, "-I", supervisor.__file__],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same, on Windows
            env=environ,
        )
    write_line(keeper, json.dumps(order))
    return keeper


def _complaint(log: Path, start: int) -> str:
    """Why a server did not start: the fatal error in its log since `start`, else the last line."""
    printed = log.read_bytes()[start:].decode(errors="replace") if log.exists() else ""
    line = last_line("\n".join(line for line in printed.splitlines() if "FATAL:" in line) or printed)
    return line.partition("FATAL:")[2].strip() or line
