"""Clocks that jump, as a time server sets them: no lease ends early, none lasts longer, and no coordinator is locked out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.errors import ShoalError
from shoal.transports.postgres import LeaseClient, PostgresServer
from shoal.transports.postgres import coordinator_connection as office
from tests.support.eventually import eventually
from tests.support.postgres_server import Database
from tests.support.transport_harness import PATIENCE_S

pytestmark = pytest.mark.whole

A_DAY = 86_400.0
JUMPS = pytest.mark.parametrize("jump_s", [A_DAY, -A_DAY], ids=["forwards", "backwards"])


@pytest.fixture
def server(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresServer]:
    monkeypatch.setattr(office, "BEAT_S", 0.05)
    made = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000)
    yield made
    made.close()


def workers(database: Database, *names: str) -> Iterator[LeaseClient]:
    for name in names:
        client = LeaseClient(database.conninfo("coordinator"), poll_interval_s=0.1)
        client.join(name, {})
        yield client


def set_clock(database: Database, jump_s: float) -> None:
    """What is the same to the database as a jump of its clock: everything else that it knows was that much longer ago."""
    columns = database.rows(
        "SELECT table_name, column_name FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)"
        " WHERE table_schema = 'shoal' AND table_type = 'BASE TABLE' AND data_type = 'timestamp with time zone'"
    )
    with database.connect() as owner, owner.transaction():
        for table, column in columns:
            moved = f'UPDATE shoal."{table}" SET "{column}" = "{column}" - make_interval(secs => {jump_s}) WHERE isfinite("{column}")'
            owner.execute(moved.encode())


def wait_for_heartbeat(database: Database) -> None:
    seen = "SELECT beat_at FROM shoal.coordinator"
    before = database.rows(seen)
    eventually(lambda: database.rows(seen) != before)


@JUMPS
def test_a_lease_outlives_a_jump_of_the_servers_clock(database: Database, server: PostgresServer, jump_s: float) -> None:
    server.issue(1, [(0, 0, 1)], 60.0, 3)
    slow, other = workers(database, "slow", "other")
    (unit,) = slow.claim(1, 0.0)
    set_clock(database, jump_s)
    wait_for_heartbeat(database)
    assert other.claim(1, 0.0) == []
    assert slow.submit(unit, {}, [b"x"]) == "accepted"
    slow.close()
    other.close()


@JUMPS
def test_a_lease_of_a_dead_worker_ends_in_its_time_although_the_clock_jumped(
    database: Database, server: PostgresServer, jump_s: float
) -> None:
    server.issue(1, [(0, 0, 1)], 0.5, 3)
    dead, other = workers(database, "dead", "other")
    (unit,) = dead.claim(1, 0.0)
    set_clock(database, jump_s)
    eventually(lambda: other.claim(1, 0.0), timeout_s=PATIENCE_S)
    assert dead.submit(unit, {}, [b"x"]) == "late"
    dead.close()
    other.close()


def test_a_worker_that_vanished_before_a_jump_is_not_alive_after_it(database: Database, server: PostgresServer) -> None:
    """A sign of life that seems to come from tomorrow is none of today."""
    next(workers(database, "gone")).close()
    with database.connect() as owner:
        owner.execute("UPDATE shoal.workers SET left_at = NULL")
    assert database.rows("SELECT alive FROM shoal.worker_list") == [(True,)]
    set_clock(database, -A_DAY)
    assert database.rows("SELECT alive FROM shoal.worker_list") == [(False,)]


def test_a_coordinator_that_died_elsewhere_is_replaced_although_the_clock_jumped(
    database: Database, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.issue(1, [(0, 0, 1)], 60.0, 3)
    (slow,) = workers(database, "slow")
    (unit,) = slow.claim(1, 0.0)
    monkeypatch.setattr(office, "SILENT_S", PATIENCE_S)
    with database.connect() as owner:
        owner.execute("UPDATE shoal.coordinator SET host = 'far-away'")
    with pytest.raises(ShoalError, match="on far-away"):
        PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000)
    server._heartbeat.close()
    set_clock(database, -A_DAY)
    successor = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000)
    assert slow.submit(unit, {}, [b"x"]) == "accepted"
    slow.close()
    successor.close()
