"""Servers that stop and crash, coordinators that are replaced, poolers, transactions that somebody forgot to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psycopg
import pytest

from shoal.errors import ShoalError
from shoal.transports import Message, Request, Unreachable
from shoal.transports.database_address import parse
from shoal.transports.netem import LinkProfile, NetemProxy
from shoal.transports.postgres import LeaseClient, PostgresClient, PostgresServer
from shoal.transports.postgres import coordinator_connection as office
from shoal.transports.postgres import reconnecting as line
from shoal.transports.postgres.coordinator_connection import CoordinatorReplaced
from shoal.transports.postgres.lease_client import ClaimedUnit
from shoal.transports.postgres.reconnecting import ReconnectingConnection
from shoal.transports.postgres.store import PostgresJournal
from tests.support.eventually import eventually
from tests.support.postgres_server import Database, PostgresProcess, running
from tests.support.transport_harness import PATIENCE_S, Calling, answering, call_until_answered, take

pytestmark = pytest.mark.whole

LARGE = bytes(range(256)) * 12_000
Serve = Callable[[], PostgresServer]
Enter = Callable[[], LeaseClient]


@pytest.fixture
def serve(database: Database) -> Iterator[Serve]:
    made: list[PostgresServer] = []

    def serve() -> PostgresServer:
        made.append(PostgresServer(database.conninfo(), max_frame_bytes=10_000_000))
        return made[-1]

    yield serve
    for server in made:
        server.close()
    assert database.rows("SELECT * FROM shoal.orphans()") == []


@pytest.fixture
def enter(database: Database) -> Iterator[Enter]:
    made: list[LeaseClient] = []

    def enter() -> LeaseClient:
        made.append(LeaseClient(database.conninfo("coordinator"), poll_interval_s=1.0))
        made[-1].join(None, {})
        return made[-1]

    yield enter
    for desk in made:
        desk.close()


def claimed(desk: LeaseClient) -> ClaimedUnit:
    """A claim ends with any news: claim until there is a unit."""
    while not (units := desk.claim(1, PATIENCE_S)):
        pass
    return units[0]


def cut_off(database: Database) -> None:
    """End every connection of others, as a server that is restarted or a router that forgot them would."""
    database.rows(
        "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
        int(1000 * PATIENCE_S),
    )


# --- one coordinator at a time ----------------------------------------------------------------------------


def test_a_second_coordinator_is_told_of_the_first(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(office, "SILENT_S", PATIENCE_S)  # a machine that stands still for some seconds is not silent
    first = serve()
    with pytest.raises(ShoalError, match=f"another coordinator .process {os.getpid()} on .* works on"):
        serve()
    first.close()
    serve()


def test_a_coordinator_that_died_here_is_replaced_at_once(database: Database, serve: Serve) -> None:
    code = f"""
import os
from shoal.transports.postgres import PostgresServer
server = PostgresServer({database.conninfo()!r}, max_frame_bytes=1000)
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    with database.connect() as connection:
        connection.execute("UPDATE shoal.coordinator SET alive_at = now() + interval '1 hour'")  # it is not replaced for its silence
    serve()


def test_one_that_fell_silent_elsewhere_is_replaced_and_cannot_go_on(
    database: Database, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(office, "SILENT_S", PATIENCE_S)
    old = serve()
    old.issue(1, [(0, 0, 1)], 10.0, 3)
    with database.connect() as connection:
        connection.execute("UPDATE shoal.coordinator SET host = 'far-away'")
    with pytest.raises(ShoalError, match="on far-away"):
        serve()
    old._heartbeat.close()
    with database.connect() as connection:
        connection.execute("UPDATE shoal.coordinator SET alive_at = now() - make_interval(secs => %s)", (PATIENCE_S + 1,))
    serve()
    for forbidden in (lambda: old.issue(2, [], 10.0, 3), lambda: old.publish(1, "full", {}, []), lambda: PostgresJournal(old).begin()):
        with pytest.raises(CoordinatorReplaced, match="taken over"):
            forbidden()
    assert database.rows("SELECT iteration FROM shoal.iterations") == [(1,)]


def test_one_who_was_replaced_notices_although_nobody_asks_anything(database: Database, serve: Serve) -> None:
    old = serve()
    with database.connect() as connection:
        connection.execute("UPDATE shoal.coordinator SET id = gen_random_uuid()")  # as a successor does
    assert old.replaced.wait(PATIENCE_S)
    with pytest.raises(CoordinatorReplaced, match="taken over"):
        old.poll(PATIENCE_S)


def test_a_successor_waits_for_a_transaction_that_is_about_to_end(database: Database, serve: Serve) -> None:
    old = serve()
    with database.connect() as connection, old.transaction():
        old.issue(1, [(0, 0, 1)], 10.0, 3)
        connection.execute(f"SET lock_timeout = '{PATIENCE_S:g} s'".encode())  # the coordinator's own sign of life may hold the row now
        connection.execute("UPDATE shoal.coordinator SET alive_at = now()")  # a sign of life passes
        connection.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute("DELETE FROM shoal.coordinator")


# --- connections are lost -----------------------------------------------------------------------------------


def test_workers_go_on_over_new_connections(database: Database, serve: Serve, enter: Enter) -> None:
    server, desk = serve(), enter()
    server.issue(1, [(0, n, 1) for n in range(4)], 100.0, 3)
    cut_off(database)
    (unit,) = desk.claim(1, PATIENCE_S)
    cut_off(database)
    assert desk.submit(unit, {}, [LARGE]) == "accepted"
    cut_off(database)
    assert desk.submit(unit, {}, [LARGE]) == "accepted"  # its answer may have been lost
    assert len(take(server)) == 1
    assert server.poll(0) == []
    assert (server.table()["completed"], server.table()["claimed"]) == (1, 0)
    desk.heartbeat("working", {})
    cut_off(database)
    with pytest.raises(Unreachable):  # each sign of life is tried once
        desk.heartbeat("working", {})
    desk.heartbeat("working", {})


def test_a_claim_that_waits_finds_its_way_back(database: Database, serve: Serve, enter: Enter) -> None:
    server, desk = serve(), enter()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(claimed(desk).start))
    thread.start()
    cut_off(database)
    server.carry_out(lambda: server.issue(1, [(0, 5, 1)], 100.0, 3))
    thread.join()
    assert found == [5]


def test_a_transaction_cut_off_is_done_once(database: Database, serve: Serve) -> None:
    server = serve()
    journal = PostgresJournal(server)
    journal.begin()
    tries: list[int] = []

    def work() -> None:
        tries.append(1)
        journal.append({"n": len(tries)}, (LARGE,))
        if len(tries) == 1:
            cut_off(database)
        server.publish(1, "full", {}, [LARGE])

    server.carry_out(work)
    assert len(tries) == 2
    assert [record for record, _ in PostgresJournal(server).recover(1)] == [{"n": 2}]


def test_a_commit_whose_answer_was_lost_counts_as_done(database: Database, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    journal = PostgresJournal(server)
    journal.begin()
    tries: list[int] = []

    def work() -> None:
        tries.append(1)
        journal.append({"n": 1}, ())

    commit = psycopg.Transaction._exit_gen

    def commit_and_lose(transaction: psycopg.Transaction, *args: object) -> object:
        result = yield from commit(transaction, *args)  # type: ignore[arg-type]
        if len(tries) == 1:
            monkeypatch.undo()
            raise psycopg.OperationalError("the answer was lost")
        return result

    monkeypatch.setattr(psycopg.Transaction, "_exit_gen", commit_and_lose)
    server.carry_out(work)
    assert len(tries) == 1
    assert [record for record, _ in PostgresJournal(server).recover(1)] == [{"n": 1}]


# --- the server crashes ---------------------------------------------------------------------------------------


@pytest.fixture
def own_postgres() -> Iterator[PostgresProcess]:
    """One that a test may crash."""
    with running() as server:
        yield server


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGQUIT], ids=["restart", "crash"])
def test_a_run_survives_the_server(own_postgres: PostgresProcess, how: signal.Signals) -> None:
    database = Database(own_postgres)
    server = PostgresServer(database.conninfo(), max_frame_bytes=10_000_000)
    desk = LeaseClient(database.conninfo("student"), poll_interval_s=0.2)
    desk.join("mia", {})
    client = PostgresClient(database.conninfo("student"), max_frame_bytes=10_000_000)
    server.open_run(Message({"config": "x"}), resume=False)
    with server.transaction():
        server.publish(1, "full", {"a": 1}, [LARGE])
        server.publish(2, "difference", {}, [b"change"])
        server.issue(2, [(0, n, 1) for n in range(3)], 100.0, 3)
    first, second = desk.claim(2, PATIENCE_S)
    assert desk.submit(first, {}, [LARGE]) == "accepted"
    own_postgres.stop(how)
    restarting = threading.Timer(0.3, own_postgres.start)
    restarting.start()
    assert desk.submit(second, {}, [LARGE]) == "accepted"
    restarting.join()
    assert sorted(bytes(request.message.frames[0]) == LARGE for request in take(server, 2)) == [True, True]
    weights = [desk.weights(-1), desk.weights(1)]
    assert [(found.version, found.frames) for found in weights if found] == [(1, (LARGE,)), (2, (b"change",))]
    with answering(server, lambda request: Message({"ok": True}, (LARGE,))):
        assert call_until_answered(client, Message({}, (LARGE,))).frames == (LARGE,)
    assert server.table()["completed"] == 2
    assert len(desk.claim(5, 0.0)) == 1
    for each in (client, desk, server):
        each.close()
    assert database.rows("SELECT * FROM shoal.orphans()") == []


def test_a_commit_that_a_crash_prevented_is_done_again(own_postgres: PostgresProcess) -> None:
    """After the crash, other transactions have the numbers of those that the crash undid."""
    database = Database(own_postgres)
    server = PostgresServer(database.conninfo(), max_frame_bytes=10_000_000)
    journal, tries = PostgresJournal(server), list[int]()
    journal.begin()

    def crash() -> None:
        own_postgres.stop(signal.SIGQUIT)
        own_postgres.start()
        with own_postgres.connect("postgres") as other:
            for _ in range(50):
                other.execute("SELECT pg_current_xact_id()")

    def work() -> None:
        tries.append(1)
        journal.append({"n": 1}, ())
        if len(tries) == 1:
            server.before_commit(crash)

    server.carry_out(work)
    assert len(tries) == 2
    assert [record for record, _ in PostgresJournal(server).recover(1)] == [{"n": 1}]
    server.close()


def test_a_question_in_flight_is_lost_with_a_crash_and_said_so(own_postgres: PostgresProcess) -> None:
    database = Database(own_postgres)
    server = PostgresServer(database.conninfo(), max_frame_bytes=10_000)
    client = PostgresClient(database.conninfo("student"), max_frame_bytes=10_000, poll_interval_s=0.2)
    call = Calling(client, Message({}))
    (request,) = take(server)
    server.reply(request, Message({"ok": True}, (bytes(5000),)))
    assert call.answer().header == {"ok": True}
    own_postgres.stop(signal.SIGQUIT)
    own_postgres.start()
    with answering(server, lambda request: Message({"again": True}, request.message.frames)):
        assert call_until_answered(client, Message({}, (b"x",))).header == {"again": True}
    client.close()
    server.close()


# --- what stands in between -----------------------------------------------------------------------------------


def test_nothing_relies_on_a_session(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """As through a transaction pooler: every statement outside a transaction finds another session, which has forgotten all of the last."""
    connect = ReconnectingConnection._connect

    def forgetful(line: ReconnectingConnection) -> psycopg.Connection[tuple[object, ...]]:
        connection = connect(line)
        execute = connection.execute

        def execute_and_forget(*args: object, **options: object) -> object:
            if connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                execute("DISCARD ALL")
            return execute(*args, **options)  # type: ignore[call-overload]

        connection.execute = execute_and_forget  # type: ignore[method-assign]
        return connection

    monkeypatch.setattr(ReconnectingConnection, "_connect", forgetful)
    server = PostgresServer(database.conninfo(), max_frame_bytes=10_000_000, poll_interval_s=0.05)
    desk = LeaseClient(database.conninfo("student"), poll_interval_s=0.05)
    client = PostgresClient(database.conninfo("student"), max_frame_bytes=10_000_000, poll_interval_s=0.05)
    desk.join("mia", {})
    server.open_run(Message({"a": 1}), resume=False)
    with server.transaction():
        server.publish(1, "full", {}, [LARGE])
        server.issue(1, [(0, 0, 1)], 100.0, 3)
    assert desk.read_run().header == {"a": 1}
    assert desk.submit(desk.claim(1, PATIENCE_S)[0], {}, [LARGE]) == "accepted"
    server.consume(*take(server))
    desk.heartbeat("working", {})
    with answering(server):
        assert client.call(Message({"b": 2}, (LARGE,)), PATIENCE_S).frames == (LARGE,)
    timer = threading.Timer(0.2, server.issue, (2, [(0, 0, 1)], 100.0, 3))
    timer.start()
    assert claimed(desk).iteration == 2  # heard of by looking again
    timer.join()
    for each in (client, desk, server):
        each.close()


# --- somebody forgot to end a transaction -----------------------------------------------------------------------


def test_claims_do_not_walk_through_the_dead_rows_that_a_long_transaction_keeps(database: Database, serve: Serve, enter: Enter) -> None:
    server, desk = serve(), enter()
    with database.connect() as forgotten:
        forgotten.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        forgotten.execute("SELECT count(*) FROM shoal.units")
        server.issue(1, [(0, n, 1) for n in range(5000)], 100.0, 3)
        for _ in range(500):
            assert len(desk.claim(10, 0.0)) == 10
        desk._connection.run(lambda line: line.execute("SELECT pg_stat_force_next_flush()"), 1.0)
        desk.claim(1, 0.0)
        read = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE schemaname = 'shoal' AND indexrelname = 'units_pending'"
        eventually(lambda: database.rows(read)[0][0] >= 5000)
        assert database.rows(read)[0][0] < 3 * 5000 + 1  # walking from the beginning each time would be 1.2 million


def test_a_stuck_upload_does_not_hold_up_the_coordinator(database: Database, serve: Serve, enter: Enter) -> None:
    """A student whose network broke in the middle of an upload."""
    server, desk = serve(), enter()
    server.issue(1, [(0, 0, 1)], 100.0, 3)
    (unit,) = desk.claim(1, 0.0)
    with database.connect("student") as stuck:
        stuck.execute("BEGIN")
        stuck.execute("SELECT shoal.is_lease_valid(%s, %s)", (unit.id, unit.lease))
        stuck.execute("SELECT shoal.put_part(gen_random_uuid(), 0, %s)", (bytes(100_000),))
        stuck.execute("SET LOCAL idle_in_transaction_session_timeout = 0")  # it is not ended meanwhile, however slow this machine is
        began = time.monotonic()
        server.issue(2, [(0, 0, 1)], 100.0, 3)
        assert time.monotonic() - began < PATIENCE_S / 2
        stuck.execute("ROLLBACK")
    assert database.rows("SELECT count(*) FROM shoal.parts") == [(0,)]


def test_a_lease_counts_as_valid_while_the_database_does_not_answer(database: Database, serve: Serve) -> None:
    server, database_of = serve(), parse(database.conninfo("coordinator"))
    proxy = NetemProxy(f"tcp://{database_of.host}:{database_of.port}", LinkProfile(0.0, 0.0, 0.0, 1e6))
    here = database_of._replace(host="127.0.0.1", port=int(proxy.address.rpartition(":")[2]))
    with contextlib.closing(LeaseClient(here.address, poll_interval_s=1.0, patience_s=PATIENCE_S)) as desk:
        desk.join(None, {})
        server.issue(1, [(0, 0, 1)], 100.0, 3)
        unit = claimed(desk)
        assert desk.is_lease_valid(unit)
        server.issue(2, [(0, 0, 1)], 100.0, 3)
        eventually(lambda: desk._connection.notification_count() > desk._notifications, "the student is notified")
        proxy.close()
        began = time.monotonic()
        assert desk.is_lease_valid(unit)
        assert time.monotonic() - began < PATIENCE_S, "it is not tried again until the patience is used up"


def test_who_tries_in_vain_hears_of_it_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(line, "time", SimpleNamespace(monotonic=lambda: now[0]))  # only pauses take time
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told: list[str] = []
    desk = LeaseClient(f"postgresql://eve@127.0.0.1:{port}/school", poll_interval_s=1.0, patience_s=1.5, warn=told.append)

    def pause(seconds: float) -> bool:
        now[0] += seconds
        return False

    monkeypatch.setattr(desk._connection.stopped, "wait", pause)
    with pytest.raises(Unreachable, match="no PostgreSQL answers"):
        desk.read_run(1.5)
    desk.close()
    assert [text.partition(" at ")[0] for text in told] == ["warning: no PostgreSQL answers"]
    assert "trying again for up to" in told[0]


def test_a_connection_that_is_lost_while_the_coordinator_tidies_up_ends_nothing(database: Database, serve: Serve) -> None:
    server = serve()
    server._tidied_at -= 60.0
    look = server._new_rows

    def look_and_lose() -> list[Request]:
        server._new_rows = look  # type: ignore[method-assign]
        cut_off(database)
        return []

    server._new_rows = look_and_lose  # type: ignore[method-assign]
    assert server.poll(0) == []
