"""What the coordinator must remember is in the database, and it alone brings a coordinator back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shoal.errors import ShoalError
from shoal.protocol.checksums import crc32
from shoal.transports.postgres import LeaseClient, PostgresServer, requests
from shoal.transports.postgres.store import PostgresJournal, PostgresLedger, PostgresSnapshots
from tests.support.postgres_server import Database
from tests.support.transport_harness import take

pytestmark = pytest.mark.whole

LARGE = bytes(range(256)) * 12_000


@pytest.fixture
def server(database: Database) -> Iterator[PostgresServer]:
    made = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000_000)
    yield made
    made.close()
    assert database.rows("SELECT * FROM shoal.orphans()") == []


def reopened(database: Database, server: PostgresServer) -> PostgresServer:
    server.close()
    return PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000_000)


def delivered(database: Database, server: PostgresServer, count: int) -> None:
    """So many results of units."""
    desk = LeaseClient(database.conninfo("student"), poll_interval_s=5.0)
    desk.join(None, {})
    server.issue(1, [(0, n, 1) for n in range(count)], 100.0, 3)
    for unit in desk.claim(count, 0.0):
        assert desk.submit(unit, {}, [LARGE, b"buffers"]) == "accepted"
    desk.close()


def photograph(server: PostgresServer, number: int, keep_last: int = 1) -> None:
    PostgresSnapshots(server, keep_last).copied(number, {}, {})()


def test_records_come_back_in_order(database: Database, server: PostgresServer) -> None:
    journal = PostgresJournal(server)
    assert journal.begin() == 1
    records = [({"kind": "accepted", "n": n, "raw": b"\0"}, (bytes([n]) * 1000, b"")) for n in range(3)]
    for record, frames in records[:2]:
        journal.append(record, frames)
    assert journal.begin([records[2]]) == 2
    assert (journal.records_since_snapshot, journal.bytes_since_snapshot > 1000) == (1, True)
    again = reopened(database, server)
    journal = PostgresJournal(again)
    found = [(record, tuple(map(bytes, frames))) for record, frames in journal.recover(1)]
    assert found == records
    assert journal.records_since_snapshot == 3
    journal.append({"kind": "after"})
    photograph(again, 2)
    assert [record for record, _ in PostgresJournal(again).recover(2)] == [records[2][0], {"kind": "after"}]
    with pytest.raises(ShoalError, match="snapshot 1 is missing"):
        list(PostgresJournal(again).recover(1))
    photograph(again, 3)
    again.close()
    assert database.rows("SELECT count(*) FROM shoal.records") == [(0,)]
    assert database.rows("SELECT count(*) FROM shoal.blobs") == [(2,)]  # the snapshot's own


def test_frames_of_a_request_are_not_written_again(database: Database, server: PostgresServer) -> None:
    delivered(database, server, 1)
    journal = PostgresJournal(server)
    journal.begin()
    (request,) = take(server)
    with server.transaction():
        journal.append({"n": 1}, request.message.frames)
        server.consume(request)
    journal.begin([({"n": 1}, request.message.frames)])  # a round that is open when a snapshot is taken
    held = (
        "SELECT uses, bytes FROM shoal.blobs b WHERE NOT EXISTS (SELECT FROM shoal.snapshots s WHERE b.id = ANY (s.frames)) ORDER BY bytes"
    )
    assert database.rows(held) == [(2, 7), (2, len(LARGE))]
    photograph(server, 2)
    assert database.rows(held) == [(1, 7), (1, len(LARGE))]
    ((_, frames),) = PostgresJournal(server).recover(2)
    assert tuple(map(bytes, frames)) == (LARGE, b"buffers")
    journal.begin([({"n": 1}, frames)])  # as a coordinator that came back would
    assert database.rows(held) == [(2, 7), (2, len(LARGE))]


def test_frames_get_their_checksums_once_while_they_are_read(
    database: Database, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered(database, server, 1)
    (request,) = take(server, 1)
    assert [server.known.checksum_of(frame) for frame in request.message.frames] == [crc32(LARGE), crc32(b"buffers")]
    journal = PostgresJournal(server)
    journal.begin()
    monkeypatch.setattr(requests, "crc32", None)  # no second pass over the numbers when the round closes
    journal.append({"kind": "accepted"}, request.message.frames)
    monkeypatch.undo()
    again = reopened(database, server)
    ((record, frames),) = PostgresJournal(again).recover(1)
    assert (record, bytes(frames[0])) == ({"kind": "accepted"}, LARGE)
    again.close()


def test_frames_that_a_crashed_server_has_forgotten_are_written_again(database: Database, server: PostgresServer) -> None:
    """What a worker has sent is confirmed when it is in the journal: a server that is killed before may lose it."""
    delivered(database, server, 1)
    (request,) = take(server)
    journal = PostgresJournal(server)
    journal.begin()
    with database.connect() as owner:
        for table in ("contributions", "parts", "blobs"):
            owner.execute(f"DELETE FROM shoal.{table}".encode())
    with server.transaction():
        journal.append({"kind": "accepted"}, request.message.frames)
        server.consume(request)
    again = reopened(database, server)
    ((_, frames),) = PostgresJournal(again).recover(1)
    again.close()
    assert tuple(map(bytes, frames)) == (LARGE, b"buffers")


def test_what_was_recorded_is_not_delivered_again_and_the_rest_is(database: Database, server: PostgresServer) -> None:
    delivered(database, server, 2)
    journal = PostgresJournal(server)
    journal.begin()
    first, second = take(server, 2)
    with server.transaction():
        journal.append({"seq": first.number}, first.message.frames)
        server.consume(first)

    def die_before_the_end() -> None:
        with server.transaction():
            journal.append({"seq": second.number}, second.message.frames)
            server.consume(second)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die_before_the_end()
    again = reopened(database, server)
    assert [record["seq"] for record, _ in PostgresJournal(again).recover(1)] == [first.number]
    assert [request.number for request in take(again)] == [second.number]
    again.close()


def test_the_ledger_is_cut_and_written_again(server: PostgresServer) -> None:
    ledger = PostgresLedger(server)
    for version in range(5):
        ledger.append({"version": version})
    ledger.cut(3)
    ledger.append({"version": "again"})
    assert ledger.length == 4
    assert [line["version"] for line in ledger] == [0, 1, 2, "again"]
    with pytest.raises(ShoalError, match="shorter"):
        ledger.cut(9)


def test_snapshots_hold_weights_and_state(database: Database, server: PostgresServer) -> None:
    snapshots = PostgresSnapshots(server, 2)
    assert snapshots.newest(pytest.fail) is None
    for step in (1, 2, 3):
        weights = torch.full((300, 1000), float(step))
        write = snapshots.copied(step, {"model.w": weights}, {"rng": torch.arange(3), "seats": {3: ("a", 1.5)}})
        weights.zero_()  # what was copied is written, whatever comes meanwhile
        write()
        write()  # as after a connection that was lost when all was done
    assert [path.name for path in snapshots.all()] == ["step-00000002", "step-00000003"]
    found = snapshots.newest(pytest.fail)
    assert found is not None
    assert found.step == 3
    assert torch.equal(found.weights["model.w"], torch.full((300, 1000), 3.0))
    assert found.state["seats"] == {3: ("a", 1.5)}
    with database.connect() as connection:
        connection.execute(
            "UPDATE shoal.parts SET data = overlay(data placing '\\xff' from 200000)"
            " FROM shoal.snapshots s WHERE s.number = 3 AND blob = frames[1] AND n = 0"
        )
    warnings: list[str] = []
    older = snapshots.newest(warnings.append)
    assert older is not None
    assert older.step == 2
    assert "step-00000003 is damaged" in warnings[0]
