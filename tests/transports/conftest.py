"""Every transport, one after the other; and a PostgreSQL server for those that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.postgres_server import database, postgres
from tests.support.transport_harness import KINDS, Harness

__all__ = ["database", "harness", "postgres"]


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    database = request.getfixturevalue("database") if request.param == "postgres" else None
    made = Harness(request.param, database)
    yield made
    made.close()
