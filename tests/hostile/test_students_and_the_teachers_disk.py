"""Students who try to fill the teacher's disk or to keep the server busy, with nothing but a student's role, on a live server."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import errors

from shoal.transports import Refused
from shoal.transports.database_address import Access, parse
from shoal.transports.postgres import LeaseClient, PostgresServer, schema
from shoal.transports.postgres.enrolment import own_access
from shoal.transports.postgres.watchdog import Bounds, Watchdog, shut_out_harmful
from tests.support.eventually import eventually
from tests.support.postgres_server import Database, PostgresProcess
from tests.support.students import Student, connected
from tests.support.transport_harness import PATIENCE_S

# --- code and functions of the server -------------------------------------------------------------------------

SHUT = (
    "DO $$ BEGIN FOR n IN 1 .. 3 LOOP RAISE LOG 'flood'; END LOOP; END $$",
    "DO LANGUAGE sql ''",
    "CREATE FUNCTION pg_temp.mine() RETURNS void LANGUAGE sql AS ''",
    "CREATE TEMPORARY TABLE mine (n integer)",
    "CREATE SCHEMA mine",
    "SELECT pg_logical_emit_message(false, 'shoal', repeat('x', 1000))",
    "SELECT pg_logical_emit_message(true, 'shoal', 'x'::bytea)",
    "SELECT pg_create_physical_replication_slot('mine', true)",
    "SELECT pg_create_logical_replication_slot('mine', 'pgoutput')",
    "SELECT pg_copy_physical_replication_slot('one', 'other')",
    "SELECT pg_drop_replication_slot('mine')",
    "SELECT pg_export_snapshot()",
    "SELECT pg_current_xact_id()",
    "SELECT txid_current()",
    "SELECT lo_from_bytea(0, 'x')",
    "SELECT lo_creat(-1)",
    "SELECT query_to_xml('SELECT 1', true, true, '')",
    "SELECT pg_notify('shoal_work', '')",
    "SELECT pg_advisory_lock(1)",
    "SELECT pg_stat_reset()",
    "SELECT pg_log_backend_memory_contexts(1)",
    "SELECT pg_switch_wal()",
    "SELECT pg_rotate_logfile()",
    "COPY (SELECT 1) TO '/tmp/mine'",
    "CHECKPOINT",
    "SET log_min_messages = debug5",
    "SET log_min_error_statement = error",
    "SET log_statement = 'all'",
    "SET temp_file_limit = -1",
    "ALTER ROLE CURRENT_USER SET log_min_messages = debug5",
    "ALTER ROLE CURRENT_USER RESET log_min_messages",
)


def test_a_student_runs_no_code_and_calls_nothing_that_writes(eve: Access) -> None:
    with connected(eve) as student:
        for statement in SHUT:
            with pytest.raises((errors.InsufficientPrivilege, errors.FeatureNotSupported)) as problem:
                student.execute(statement.encode())
            assert isinstance(problem.value, errors.InsufficientPrivilege) or "inline code" in str(problem.value), statement


def test_every_built_in_function_that_changes_something_is_shut(database: Database, eve: Access) -> None:
    """A newer PostgreSQL has new functions: this list says what a student may call that is volatile, and each of these was looked at."""
    open_ones = database.rows(
        "SELECT DISTINCT proname::text FROM pg_proc p WHERE pronamespace = 'pg_catalog'::regnamespace AND provolatile = 'v'"
        " AND prorettype::regtype::text !~ '(trigger|handler|internal)$' AND NOT 'internal'::regtype = ANY (proargtypes)"
        " AND has_function_privilege(%s, oid, 'EXECUTE') AND proname !~ '^(pg_(stat_)?get|pg_stat_get)_' ORDER BY 1",
        eve.user,
    )
    assert {name for (name,) in open_ones} <= HARMLESS


HARMLESS = {
    *("amvalidate", "array_sample", "array_shuffle", "clock_timestamp", "timeofday", "current_query", "currtid2", "setseed", "set_config"),
    *("currval", "lastval", "nextval", "setval", "gen_random_uuid", "uuidv4", "uuidv7", "random", "random_normal", "ts_rewrite"),
    *("pg_sleep", "pg_sleep_for", "pg_sleep_until", "pg_is_in_recovery", "pg_jit_available", "pg_lock_status", "plpgsql_validator"),
    *("pg_database_size", "pg_indexes_size", "pg_relation_size", "pg_table_size", "pg_tablespace_size", "pg_total_relation_size"),
    *("pg_blocking_pids", "pg_safe_snapshot_blocking_pids", "pg_xact_status", "txid_status", "pg_xact_commit_timestamp"),
    *("pg_xact_commit_timestamp_origin", "pg_partition_ancestors", "pg_partition_tree", "pg_notification_queue_usage"),
    *("pg_sequence_last_value", "pg_collation_actual_version", "pg_database_collation_actual_version", "pg_stat_clear_snapshot"),
    *("pg_stat_force_next_flush", "pg_control_checkpoint", "pg_control_init", "pg_control_recovery", "pg_control_system"),
    *("pg_current_wal_flush_lsn", "pg_current_wal_insert_lsn", "pg_current_wal_lsn", "pg_last_committed_xact"),
    *("pg_last_wal_receive_lsn", "pg_last_wal_replay_lsn", "pg_last_xact_replay_timestamp"),
}
"""They read, compute, sleep, or check the permissions of the sequence."""


def test_existing_functions_still_run_for_students_and_the_coordinator(server: PostgresServer, eve: Access) -> None:
    server.issue(1, [(0, 0, 1)], 100.0, 1, None)
    with connected(eve) as student:
        student.execute("SELECT shoal.join_run(gen_random_uuid(), 'eve', '{}')")
    assert server.table()["pending"] == 1


# --- the server's log -----------------------------------------------------------------------------------------


def test_failing_statements_and_debugging_write_nothing_into_the_servers_log(database: Database, eve: Access) -> None:
    log = database.server.folder / "log"
    with connected(eve) as student:
        student.execute("ALTER ROLE CURRENT_USER RESET ALL")
    with connected(eve) as student:
        before = log.stat().st_size
        for statement in ("SELECT repeat('x', 1000000)::int", f"SELECT no_such_function('{'x' * 1_000_000}')", "SELECT 'x", "SELECT 1/0"):
            with pytest.raises(psycopg.Error):
                student.execute(statement.encode())
        for setting in ("debug_print_parse", "debug_print_rewritten", "debug_print_plan"):
            student.execute(f"SET {setting} = on".encode())
        student.execute("SELECT count(*) FROM pg_class a JOIN pg_class b USING (oid)")
        student.execute("SET transaction_timeout = 1")
        with contextlib.suppress(psycopg.Error):
            student.execute(f"SELECT pg_sleep(1), '{'x' * 1_000_000}'".encode())
    ours = log.read_bytes()[before:].replace(b"\0", b"")
    assert b"xxxxxxxx" not in ours
    assert b"parse tree" not in ours
    assert b"no_such_function" not in ours


# --- what a role uses in all ----------------------------------------------------------------------------------

COUNT_NOW = "SELECT pg_stat_force_next_flush()"
"""PostgreSQL counts what a connection has written once a second while it works, and after ten when it is idle."""
Watch = Callable[[float], list[str]]
TIGHT = Bounds(busy_s=6.0, calls=200, calls_for_a_unit=100, wal_bytes=4 << 20, wal_records=200, temp_bytes=4 << 20)


@pytest.fixture
def watch(database: Database, server: PostgresServer) -> Iterator[Watch]:
    """Checks what students use, as the coordinator does with every heartbeat, some seconds later; returns the notes for the teacher."""
    server._heartbeat.close()
    dog, now = Watchdog(TIGHT), 0.0
    with database.connect("coordinator") as coordinator:

        def look(seconds: float = 1.5) -> list[str]:
            nonlocal now
            now += seconds
            shut_out_harmful(coordinator, dog, now)
            return server.notes()

        look()
        yield look


def is_told(watch: Watch, why: str) -> None:
    """The teacher is told, and the student is in quarantine."""
    notes: list[str] = []
    eventually(lambda: bool(notes.extend(watch(1.5)) or notes))
    assert len(notes) == 1
    assert notes[0].startswith(f"warning: student-eve is in quarantine: {why}"), notes


def is_disconnected(student: Student) -> bool:
    try:
        student.execute("SELECT 1")
    except psycopg.OperationalError:
        return True
    return False


def test_statements_that_each_end_in_time_are_added_up(watch: Watch, eve: Access) -> None:
    told = threading.Event()

    def work() -> None:
        with contextlib.suppress(psycopg.OperationalError), contextlib.closing(connected(eve)) as student:
            student.execute("SET statement_timeout = 400")
            while not told.is_set():
                with contextlib.suppress(errors.QueryCanceled):
                    student.execute("SELECT count(*) FROM pg_attribute a, pg_attribute b, pg_attribute c")

    thread = threading.Thread(target=work)
    thread.start()
    notes: list[str] = []
    try:
        eventually(lambda: bool(notes.extend(watch(5.0)) or notes))
    finally:
        told.set()
        thread.join(PATIENCE_S)
    assert "student-eve is in quarantine: it kept the server busy for " in notes[0]
    assert not thread.is_alive()


def test_notifications_are_counted(watch: Watch, eve: Access) -> None:
    with contextlib.closing(connected(eve)) as student:
        for number in range(300):
            student.execute(f"NOTIFY shoal_work, '{number}'".encode())
        student.execute(COUNT_NOW)
        is_told(watch, "it wrote 30")
        assert is_disconnected(student)


def test_settings_of_a_role_are_no_way_to_write_without_end(watch: Watch, eve: Access) -> None:
    with contextlib.closing(connected(eve)) as student:
        for _ in range(100):
            setting = secrets.token_hex(50_000)
            student.execute(f"ALTER ROLE CURRENT_USER SET search_path = '{setting}'".encode())
        student.execute(COUNT_NOW)
        is_told(watch, "it wrote ")
        assert is_disconnected(student)


PARTS = "SELECT shoal.put_part(gen_random_uuid(), 0, convert_to(repeat('x', 10000), 'UTF8')) FROM generate_series(1, {count})"


def test_uploads_that_are_rolled_back_are_counted_though_the_connection_is_gone(watch: Watch, eve: Access) -> None:
    for _ in range(20):
        with contextlib.closing(psycopg.connect(eve.address)) as student:
            with contextlib.suppress(psycopg.Error):
                student.execute(PARTS.format(count=12).encode())
    is_told(watch, "it made 2")


def test_uploads_within_savepoints_of_an_open_transaction_are_counted(watch: Watch, eve: Access) -> None:
    with contextlib.closing(connected(eve)) as student:
        student.execute("BEGIN")
        for _ in range(150):
            student.execute("SAVEPOINT before")
            student.execute(PARTS.format(count=2).encode())
            student.execute("ROLLBACK TO SAVEPOINT before")
        is_told(watch, "it made 300 calls")
        assert is_disconnected(student)


LOOPS = (
    "SELECT shoal.heartbeat('{secret}', 'idle', '{{}}') FROM generate_series(1, 300)",
    "SELECT shoal.join_run('{secret}', 'eve', '{{}}') FROM generate_series(1, 300)",
    "SELECT shoal.claim('{secret}', gen_random_uuid(), 1, 0, false, false) FROM generate_series(1, 300)",
    "SELECT shoal.return_unit('{secret}', 1, gen_random_uuid()) FROM generate_series(1, 300)",
    "SELECT shoal.fail_unit('{secret}', 1, gen_random_uuid(), '') FROM generate_series(1, 300)",
    "SELECT shoal.submit('{secret}', 1, gen_random_uuid(), 1, 'x', '{{}}', '{{}}', true) FROM generate_series(1, 300)",
    "SELECT shoal.send_request('{secret}', n, 'x', '{{}}', '{{}}'), shoal.forget_requests('{secret}') FROM generate_series(1, 300) n",
)


def test_calls_in_a_loop_are_counted_while_their_transaction_is_open(
    database: Database, server: PostgresServer, watch: Watch, eve: Access
) -> None:
    server.issue(1, [(0, 0, 1)], 100.0, 1, None)
    calls = "SELECT calls FROM shoal.student_uses() WHERE role = %s"
    with contextlib.closing(connected(eve)) as student:
        secret = uuid.uuid4()
        student.execute("SELECT shoal.join_run(%s, 'eve', '{}')", (secret,))
        student.execute("BEGIN")
        for statement in LOOPS:
            ((before,),) = database.rows(calls, eve.user)
            student.execute(statement.format(secret=secret).encode())
            ((now,),) = database.rows(calls, eve.user)
            assert now >= before + 300, statement
        is_told(watch, "it made 2")
        assert is_disconnected(student)


def test_who_connects_again_and_again_is_shut_out(watch: Watch, eve: Access) -> None:
    notes: list[str] = []
    for _ in range(15):
        with contextlib.closing(connected(eve)):
            notes += watch(0.1)
    assert "student-eve is in quarantine: it kept the server busy" in notes[0]


def test_temporary_files_are_bounded_over_all_connections(watch: Watch, eve: Access) -> None:
    with contextlib.closing(connected(eve)) as one, contextlib.closing(connected(eve)) as other:
        for student in (one, other):
            student.execute("BEGIN")
            student.execute("SET LOCAL work_mem = 64")
            student.execute("DECLARE mine CURSOR WITH HOLD FOR SELECT repeat('x', 1000000) FROM generate_series(1, 3)")
            student.execute("COMMIT")
        is_told(watch, "its temporary files took 6 MB of the disk")
        assert is_disconnected(one)


def test_a_student_learns_why_and_is_locked_when_it_goes_on(database: Database, watch: Watch, eve: Access) -> None:
    desk = LeaseClient(eve.address, poll_interval_s=0.1)
    desk.join("eve", {})
    loop = "SELECT shoal.forget_requests(gen_random_uuid()) FROM generate_series(1, 300)"
    with contextlib.closing(connected(eve)) as student:
        student.execute(loop.encode())
        is_told(watch, "it made 30")
    assert database.rows("SELECT left(state, 22) FROM shoal.worker_list") == [("in quarantine: it made",)], "the dashboard shows it"
    with pytest.raises(Refused, match="you are in quarantine: it made 30") as problem:
        desk.claim(1, 0.0)
    assert problem.value.reason == "quarantined"
    with contextlib.closing(connected(eve)) as student:
        student.execute(loop.encode())
        (note,) = watch(1.5)
        assert note.startswith("warning: student-eve is locked: in quarantine, it made 30")
    with pytest.raises(Refused, match="is shut out of this class and not permitted to log in"):
        desk.claim(1, 0.0)
    desk.close()
    with database.connect() as owner:
        schema.grant(owner, eve.user, None, "student")
    connected(eve).close()


def test_the_classs_token_is_no_way_around(database: Database, watch: Watch) -> None:
    with contextlib.closing(database.connect("class")) as holder:
        for number in range(300):
            holder.execute(f"NOTIFY shoal_work, '{number}'")
        holder.execute(COUNT_NOW)
        notes: list[str] = []
        eventually(lambda: bool(notes.extend(watch(1.5)) or notes))
        assert notes[0].startswith("warning: the connections of class were ended: it wrote ")
        assert is_disconnected(holder)


def test_a_reader_that_floods_is_disconnected(database: Database, watch: Watch) -> None:
    with contextlib.closing(database.connect("reader")) as reader:
        for number in range(300):
            reader.execute(f"NOTIFY shoal_work, '{number}'")
        reader.execute(COUNT_NOW)
        notes: list[str] = []
        eventually(lambda: bool(notes.extend(watch(1.5)) or notes))
        assert notes[0].startswith("warning: the connections of reader were ended: it wrote ")
        assert is_disconnected(reader)


def test_an_honest_student_with_tiny_units_stays_within_the_bounds(database: Database, server: PostgresServer, eve: Access) -> None:
    dog = Watchdog(Bounds.for_frames(10_000))
    server.issue(1, [(0, n, 1) for n in range(60)], 100.0, 1, None)
    desk = LeaseClient(eve.address, poll_interval_s=0.1)
    desk.join("eve", {})
    with database.connect("coordinator") as coordinator:
        for turn in range(60):
            (unit,) = desk.claim(1, 0.0)
            assert desk.submit(unit, {}, [b"x" * 10_000]) == "accepted"
            desk.heartbeat("computing", {})
            shut_out_harmful(coordinator, dog, 1.5 * turn)
    assert server.notes() == []
    desk.close()


FLOODS = (
    "NOTIFY shoal_work, '{number}'",
    "BEGIN; SELECT shoal.forget_requests(gen_random_uuid()) FROM generate_series(1, 200); ROLLBACK",
)


@pytest.mark.long
@pytest.mark.parametrize("statement", FLOODS)
def test_a_flood_ends_by_itself_while_a_coordinator_runs(server: PostgresServer, eve: Access, statement: str) -> None:
    """With the bounds and the heartbeats of any run."""
    with contextlib.closing(connected(eve)) as student:
        statements = (statement.format(number=number).encode() for number in itertools.count())
        with pytest.raises(psycopg.OperationalError):
            any(student.execute(one) is None for one in statements)
    notes: list[str] = []
    eventually(lambda: bool(notes.extend(server.notes()) or notes))
    assert "student-eve is in quarantine: it " in notes[0]


# --- a server that others administer --------------------------------------------------------------------------


@pytest.fixture
def school(postgres: PostgresProcess) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """The connection of a teacher who owns a database and is no superuser."""
    with postgres.connect("postgres") as admin:
        admin.execute("CREATE ROLE owner_only LOGIN CREATEROLE PASSWORD 'correct-horse'")
        admin.execute("CREATE DATABASE shared OWNER owner_only")
        with psycopg.connect(postgres.conninfo("owner_only", "shared"), autocommit=True) as owner:
            yield owner
        admin.execute("DROP DATABASE shared WITH (FORCE)")
        for (role,) in admin.execute("SELECT rolname FROM pg_roles WHERE rolname IN ('room', 'student-mia')").fetchall():
            admin.execute(f'DROP ROLE "{role}"'.encode())
        admin.execute("DROP OWNED BY owner_only; DROP ROLE owner_only")


def test_what_only_a_superuser_can_close_is_listed_until_one_has_closed_it(
    postgres: PostgresProcess, school: psycopg.Connection[tuple[object, ...]], tmp_path: Path
) -> None:
    schema.init(school)
    listed = "\n".join(schema.missing_protections(school))
    for words in (
        "run code on the server (DO",
        "built-in functions",
        " more. ",
        "only a superuser can bound temporary files",
    ):
        assert words in listed
    with postgres.connect("shared") as superuser:
        schema.init(superuser)
    listed = "\n".join(schema.missing_protections(school))
    for words in ("run code", "built-in functions", "only a superuser"):
        assert words not in listed
    schema.init(school)
    schema.grant(school, "room", "correct-horse", "class")
    mia = own_access(parse(postgres.conninfo("room", "shared")), "mia", tmp_path, PATIENCE_S)
    with connected(mia) as student:
        assert student.execute("SHOW log_min_messages").fetchone() == ("fatal",)
        assert student.execute("SHOW temp_file_limit").fetchone() == ("256MB",)
        with pytest.raises(errors.InsufficientPrivilege):
            student.execute("DO $$ BEGIN END $$")
        student.execute("SELECT shoal.join_run(gen_random_uuid(), 'mia', '{}')")
