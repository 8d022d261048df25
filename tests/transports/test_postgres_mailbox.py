"""What is particular to questions and answers as rows: nothing is stored twice, and nothing stays."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from shoal.transports import Message, Unreachable
from shoal.transports.postgres import PostgresClient, PostgresServer
from shoal.transports.postgres import reconnecting as line
from shoal.transports.postgres import requests as mailbox
from shoal.transports.postgres.store import PostgresJournal
from tests.support.postgres_server import Database
from tests.support.transport_harness import PATIENCE_S, Calling, answering, take

pytestmark = pytest.mark.whole

LARGE = bytes(range(256)) * 12_000


@pytest.fixture
def server(database: Database) -> Iterator[PostgresServer]:
    made = PostgresServer(database.conninfo(), max_frame_bytes=10_000_000)
    yield made
    made.close()
    assert database.rows("SELECT * FROM shoal.orphans()") == []


@pytest.fixture
def clients(database: Database) -> Iterator[list[PostgresClient]]:
    made = [PostgresClient(database.conninfo("student"), max_frame_bytes=10_000_000) for _ in range(3)]
    yield made
    for client in made:
        client.close()


def count(database: Database, table: str) -> int:
    number: int = database.rows(f"SELECT count(*) FROM shoal.{table}")[0][0]
    return number


def test_a_frame_that_many_are_answered_with_is_stored_once(
    database: Database, server: PostgresServer, clients: list[PostgresClient]
) -> None:
    weights = memoryview(LARGE).cast("f")  # numbers, as the coordinator hands them out
    calls = [Calling(client, Message({})) for client in clients]
    for request in take(server, 3):
        server.reply(request, Message({}, (weights, b"buffers", weights)))
    assert [call.answer().frames for call in calls] == [(LARGE, b"buffers", LARGE)] * 3
    assert count(database, "published_frames") == 2
    with answering(server, lambda request: Message({})):
        for client in clients:
            client.call(Message({}), PATIENCE_S)
    server._published_frames.clear()
    server.carry_out(server.drop_unused_frames)
    assert (count(database, "published_frames"), count(database, "published_parts")) == (0, 0)


def test_nothing_is_left_of_what_was_answered_abandoned_or_hung_up(
    database: Database, server: PostgresServer, clients: list[PostgresClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_FINISHING_S", PATIENCE_S)  # who is cut off, as a call that takes longer is, says no goodbye
    answered, impatient, going = clients
    with answering(server):
        answered.call(Message({}, (LARGE,)), PATIENCE_S)
    with pytest.raises(Unreachable):
        impatient.call(Message({}, (LARGE,)), 0.3)
    call = Calling(going, Message({}, (LARGE,)))
    take(server, 2)
    going.close()
    assert isinstance(call.outcome(), Unreachable)
    assert count(database, "blobs") == count(database, "requests") == 1
    with pytest.raises(Unreachable):
        impatient.call(Message({}), 0.1)
    assert count(database, "blobs") == 0
    for client in clients:
        client.close()
    assert (count(database, "requests"), count(database, "replies")) == (0, 0)


def test_answers_that_nobody_fetched_are_thrown_away(
    database: Database, server: PostgresServer, clients: list[PostgresClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(server):
        clients[0].call(Message({}, (LARGE,)), PATIENCE_S)
    assert count(database, "replies") == 1
    monkeypatch.setattr(mailbox, "_ABANDONED_S", 0.0)
    server._tidied_at = time.monotonic() - 60.0
    server._published_frames.clear()
    server.poll(0)
    assert (count(database, "replies"), count(database, "published_frames")) == (0, 0)


def test_an_answer_comes_with_the_transaction_or_not_at_all(server: PostgresServer, clients: list[PostgresClient]) -> None:
    journal = PostgresJournal(server)
    journal.begin()
    call = Calling(clients[0], Message({"seq": 1}, (LARGE,)))
    (request,) = take(server)

    def fail_after_the_reply() -> None:
        with server.transaction():
            journal.append({"seq": 1}, request.message.frames)
            server.reply(request, Message({"confirmed": True}, (LARGE,)))
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        fail_after_the_reply()
    assert list(PostgresJournal(server).recover(1)) == []
    assert server.poll(0) == []
    with server.transaction():
        journal.append({"seq": 1}, request.message.frames)
        server.reply(request, Message({"confirmed": True}, (LARGE,)))
    assert call.answer().header == {"confirmed": True}
    ((record, frames),) = PostgresJournal(server).recover(1)
    assert (record, bytes(frames[0])) == ({"seq": 1}, LARGE)


def test_a_restarted_coordinator_finds_the_questions_that_wait(
    database: Database, server: PostgresServer, clients: list[PostgresClient]
) -> None:
    call = Calling(clients[0], Message({"early": True}))
    take(server)
    server._waiting.clear()  # as if it had died: nobody is told
    server.close()
    again = PostgresServer(database.conninfo(), max_frame_bytes=10_000_000)
    (request,) = take(again)
    again.reply(request, Message({"ok": True}))
    assert call.answer().header == {"ok": True}
    again.close()
