"""The schema: made once however many try, brought up to date, checked, described, emptied."""

from __future__ import annotations

import re
import threading

import pytest

from shoal.errors import ShoalError
from shoal.transports import Message
from shoal.transports.postgres import LeaseClient, PostgresServer, schema
from tests.support.postgres_server import Database, PostgresProcess

pytestmark = pytest.mark.whole


def test_several_may_prepare_a_database_at_once(postgres: PostgresProcess) -> None:
    with postgres.connect("postgres") as connection:
        connection.execute("DROP DATABASE IF EXISTS bare")
        connection.execute("CREATE DATABASE bare")
    with postgres.connect("bare") as connection, pytest.raises(ShoalError, match="run `shoal db init`"):
        schema.check(connection)
    versions: list[int] = []

    def prepare() -> None:
        with postgres.connect("bare") as connection:
            versions.append(schema.init(connection))

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions == [schema.latest()] * 4
    with postgres.connect("bare") as connection:
        schema.check(connection)
        assert connection.execute("SELECT count(*) FROM shoal.migrations").fetchone() == (len(schema.migrations()),)


@pytest.mark.parametrize(
    ("change", "advice"),
    [("UPDATE shoal.migrations SET version = 0", "older"), ("INSERT INTO shoal.migrations VALUES (99)", "newer")],
)
def test_a_database_of_another_version_is_refused(database: Database, change: str, advice: str) -> None:
    with database.connect() as connection:
        connection.execute(change.encode())
        with pytest.raises(ShoalError, match=advice):
            schema.check(connection)
    with pytest.raises(ShoalError, match=advice):
        PostgresServer(database.conninfo(), max_frame_bytes=1000)


def test_a_database_of_a_newer_version_is_not_changed(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("INSERT INTO shoal.migrations VALUES (10)")
        with pytest.raises(ShoalError, match=r"schema 10, here 1\).*shoal db reset"):
            schema.init(connection)
        schema.reset(connection)
        schema.check(connection)


def test_each_function_is_defined_once() -> None:
    names = re.findall(r"^CREATE (?:OR REPLACE )?FUNCTION shoal\.(\w+)", "".join(schema.migrations().values()), re.MULTILINE)
    assert len(names) == len(set(names)) > 50


def test_migrations_are_numbered_without_gaps() -> None:
    assert sorted(schema.migrations()) == list(range(1, schema.latest() + 1))


def test_a_database_is_described_and_emptied(database: Database) -> None:
    server = PostgresServer(database.conninfo(), max_frame_bytes=100_000)
    server.open_run(Message({"config": "x"}, (bytes(1000),)), resume=False)
    server.set_fact("name", "faces")
    server.issue(4, [(0, 0, 1), (0, 1, 1)], 10.0, 1)
    server.publish(3, "full", {}, [bytes(50_000)])
    desk = LeaseClient(database.conninfo("student"), poll_interval_s=1.0)
    desk.join("mia", {})
    with database.connect() as connection:
        found = schema.describe(connection)
        assert (found["schema_version"], found["facts"], found["workers"], found["orphans"]) == (
            schema.latest(),
            {"name": "faces"},
            {"mia": "joined"},
            0,
        )
        assert (found["run"]["iteration"], found["run"]["version"]) == (4, 3)
        assert found["units"] == {"pending": 2, "issued": 2, "dropped": 0}
        assert found["roles"] == {kind: kind for kind in schema.KINDS}
        assert found["bytes"]["published_parts"] > 50_000
        server.close()
        schema.reset(connection)
        found = schema.describe(connection)
        assert (found["run"], found["workers"], found["roles"]) == (None, {}, {kind: kind for kind in schema.KINDS})
    with pytest.raises(ShoalError, match="holds no run yet"):
        desk.read_run()
    desk.close()
