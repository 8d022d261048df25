"""A class in a real PostgreSQL server, with two students, for the tests that attack one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.transports.database_address import Access
from shoal.transports.postgres import PostgresServer
from tests.support.postgres_server import Database, database, postgres
from tests.support.students import dismiss, enrolled

__all__ = ["database", "eve", "mia", "postgres", "server"]


@pytest.fixture
def server(database: Database) -> Iterator[PostgresServer]:
    made = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000)
    yield made
    made.close()


@pytest.fixture
def mia(database: Database, tmp_path: Path) -> Iterator[Access]:
    made = enrolled(database, "mia", tmp_path / "mia")
    yield made
    dismiss(database, made)


@pytest.fixture
def eve(database: Database, tmp_path: Path) -> Iterator[Access]:
    made = enrolled(database, "eve", tmp_path / "eve")
    yield made
    dismiss(database, made)
