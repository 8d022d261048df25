"""Damage in the database's own journal, ledger and snapshots is told by name; nothing damaged is taken for what it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.runs.folder.repair import repair_database
from shoal.transports.postgres import PostgresServer
from shoal.transports.postgres.queries import damage
from shoal.transports.postgres.store import PostgresJournal, PostgresLedger, PostgresSnapshots
from tests.support.postgres_server import Database

pytestmark = pytest.mark.whole


@pytest.fixture
def server(database: Database) -> Iterator[PostgresServer]:
    """A coordinator's, with six records in two journals, six lines and a snapshot before them."""
    made = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000_000)
    journal, ledger = PostgresJournal(made), PostgresLedger(made)
    journal.begin()
    PostgresSnapshots(made, 2).copied(1, {}, {"ledger": 0, "coordinator": {"state": {"sequences": {}, "version": 0}}})()
    for number in range(6):
        if number == 3:
            journal.begin()
        with made.transaction():
            journal.append({"kind": "accepted", "worker": "ann", "seq": number, "n": number}, (bytes([number]) * 1000, b"buffers"))
            ledger.append({"from": [["ann", number]]})
    yield made
    made.close()


def recovered(server: PostgresServer) -> list[int]:
    PostgresLedger(server).cut(0)
    return [record["n"] for record, _ in PostgresJournal(server).recover(1)]


def test_what_is_sound_is_read_whole_and_has_no_damage(database: Database, server: PostgresServer) -> None:
    with database.connect() as connection:
        assert damage(connection) == []
    assert recovered(server) == [*range(6)]


FLIP = "overlay({0} PLACING set_byte(substring({0} FROM {1} FOR 1), 0, get_byte({0}, {1} - 1) # 1) FROM {1} FOR 1)"
FRAME = "(SELECT frames[1] FROM shoal.records WHERE id = (SELECT id FROM shoal.records ORDER BY id OFFSET 2 LIMIT 1))"
RECORD = "(SELECT id FROM shoal.records ORDER BY id OFFSET 2 LIMIT 1)"


SPOILED = pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (f"UPDATE shoal.records SET record = {FLIP.format('record', 12)} WHERE id = {RECORD}", "does not match its checksum"),
        (
            f"UPDATE shoal.parts SET data = {FLIP.format('data', 500)} WHERE blob = {FRAME}",
            "does not match its checksum",
        ),
        (f"UPDATE shoal.records SET frames = frames[2:2] WHERE id = {RECORD}", "does not match its checksum"),
        (f"UPDATE shoal.records SET frames = ARRAY[gen_random_uuid()] WHERE id = {RECORD}", "cannot be read"),
        (f"DELETE FROM shoal.records WHERE id = {RECORD}", "does not follow the one before it"),
        ("DELETE FROM shoal.records WHERE id = (SELECT max(id) FROM shoal.records)", "the records end before it"),
        ("DELETE FROM shoal.records WHERE journal = 2", "the records end before it"),
    ],
)


@SPOILED
def test_a_damaged_journal_is_refused_by_name(database: Database, server: PostgresServer, spoil: str, said: str) -> None:
    with database.connect() as owner:
        owner.execute(spoil.encode())
    lines = database.rows("SELECT count(*) FROM shoal.ledger")
    with pytest.raises(ShoalError, match=f"the journal in .* is damaged: .*{said}"):
        recovered(server)
    if said == "the records end before it":
        assert database.rows("SELECT count(*) FROM shoal.ledger") == lines, "what tells of the loss is still there"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("UPDATE shoal.ledger SET entry = replace(entry, '3', '8') WHERE line = 4", "line 4 of the ledger does not match its checksum"),
        ("UPDATE shoal.snapshots SET header = replace(header, 'ledger', 'budget')", "snapshot 1 does not match its checksum"),
        (f"DELETE FROM shoal.records WHERE id = {RECORD}", "does not follow the one before it"),
    ],
)
def test_the_audit_names_what_is_damaged(database: Database, server: PostgresServer, spoil: str, said: str) -> None:
    with database.connect() as owner:
        owner.execute(spoil.encode())
        assert [one for one in damage(owner) if said in one]


def test_a_damaged_snapshot_is_stepped_over(database: Database, server: PostgresServer) -> None:
    PostgresSnapshots(server, 2).copied(2, {}, {"ledger": 3})()
    with database.connect() as owner:
        owner.execute("UPDATE shoal.snapshots SET header = replace(header, 'ledger', 'budget') WHERE number = 2")
    warnings: list[str] = []
    found = PostgresSnapshots(server, 2).newest(warnings.append)
    assert found is not None
    assert found.step == 1
    assert ["its state does not match its checksum" in text for text in warnings] == [True]
    assert recovered(server) == [*range(6)]


@SPOILED
def test_a_repair_goes_back_to_what_is_sound_and_names_what_is_lost(
    database: Database, server: PostgresServer, tmp_path: Path, spoil: str, said: str
) -> None:
    server.close()
    sound = 5 if "max(id)" in spoil else 3 if "journal = 2" in spoil else 2
    with database.connect() as owner:
        owner.execute(spoil.encode())
        owner.execute(
            "INSERT INTO shoal.contributions (kind, worker, unit, iteration, epoch, start, batches)"
            " VALUES ('delivered', 'bo', 7, 1, 0, 0, 1)"
        )
    told: list[str] = []
    assert repair_database(database.conninfo("coordinator"), tmp_path, told.append)
    assert f"lost: contributions {sound} to 5 of ann, as far as they were taken" in told
    assert (tmp_path / "set-aside-1" / "ledger.jsonl").read_text().count("from") == 6
    again = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000_000)
    try:
        PostgresLedger(again).cut(0)
        records = [record for record, _ in PostgresJournal(again).recover(1)]
    finally:
        again.close()
    assert [record.get("n", record["kind"]) for record in records] == [*range(sound), "repaired"]
    assert records[-1]["lost"] == [["ann", sound, 5], ["bo", 0, 7]], "bo's result was confirmed, and in no record yet"
    assert not repair_database(database.conninfo("coordinator"), tmp_path, told.append), "nothing is left to mend"


def test_what_is_sound_is_not_repaired_nor_while_a_coordinator_works(database: Database, server: PostgresServer, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="another coordinator"):
        repair_database(database.conninfo("coordinator"), tmp_path, print)
    server.close()
    assert not repair_database(database.conninfo("coordinator"), tmp_path, print)
    assert not [*tmp_path.iterdir()]
