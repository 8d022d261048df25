"""Students who try to fill the teacher's disk or to keep the server busy, with nothing but a student's role, on a live server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import errors

from shoal.transports.database_address import Access, parse
from shoal.transports.postgres import PostgresServer, schema
from shoal.transports.postgres.enrolment import own_access
from tests.support.postgres_server import Database, PostgresProcess, running
from tests.support.transport_harness import PATIENCE_S

Student = psycopg.Connection[tuple[object, ...]]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresProcess]:
    with running() as server:
        yield server


@pytest.fixture
def database(postgres: PostgresProcess) -> Iterator[Database]:
    made = Database(postgres)
    yield made
    made.drop()


@pytest.fixture
def server(database: Database) -> Iterator[PostgresServer]:
    made = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000)
    yield made
    made.close()


@pytest.fixture
def eve(database: Database, tmp_path: Path) -> Iterator[Access]:
    """A student who came with the class's token, as any does."""
    made = own_access(parse(database.conninfo("class")), "eve", tmp_path / "eve", PATIENCE_S)
    yield made
    with database.connect() as owner:
        ended = "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity WHERE usename = %s"
        owner.execute(ended, (int(1000 * PATIENCE_S), made.user))
        owner.execute("SELECT shoal.drop_student(%s)", (made.user,))


def connected(student: Access) -> Student:
    return psycopg.connect(student.address, autocommit=True)


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
        "pg_logical_emit_message",
        "lo_create",
        "pg_export_snapshot",
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
