"""What a student's credentials can do, and that PostgreSQL itself refuses the rest."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import errors

from shoal.errors import ShoalError
from shoal.transports import Message, Refused, Unreachable
from shoal.transports.postgres import LeaseClient, PostgresClient, PostgresServer, schema
from tests.support.postgres_server import Database
from tests.support.transport_harness import PATIENCE_S

pytestmark = pytest.mark.whole

TABLES = (
    *(
        "roles",
        "coordinator",
        "run",
        "facts",
        "blobs",
        "parts",
        "published_frames",
        "published_parts",
        "requests",
        "replies",
        "workers",
        "iterations",
    ),
    *(
        "units",
        "unit_totals",
        "contributions",
        "weights",
        "journals",
        "records",
        "ledger",
        "snapshots",
        "metrics",
        "picture",
        "migrations",
        "last_commit",
    ),
    *("student_functions", "standings", "failures", "notes", "uploads", "pieces", "note_times"),
)
VIEWS = ("worker_list", "unit_counts", "progress", "active_roles", "current_iteration")


@pytest.fixture
def student(database: Database) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    with database.connect("student") as connection:
        yield connection


def refused(connection: psycopg.Connection[tuple[object, ...]], statement: str) -> None:
    with pytest.raises(errors.InsufficientPrivilege):
        connection.execute(statement.encode())


def test_the_list_of_tables_is_whole(database: Database) -> None:
    found = database.rows(
        "SELECT relname, relkind::text FROM pg_class WHERE relnamespace = 'shoal'::regnamespace AND relkind IN ('r', 'v')"
    )
    assert {name for name, kind in found if kind == "r"} == set(TABLES)
    assert {name for name, kind in found if kind == "v"} == set(VIEWS)


def test_no_table_is_a_students(database: Database, student: psycopg.Connection[tuple[object, ...]]) -> None:
    columns = dict(database.rows("SELECT attrelid::regclass::text, attname FROM pg_attribute WHERE attnum > 0 ORDER BY attnum"))
    for table in (f"shoal.{name}" for name in (*TABLES, *VIEWS)):
        refused(student, f"SELECT * FROM {table}")
        refused(student, f"SELECT {columns[table]} FROM {table}")
        if table.removeprefix("shoal.") in TABLES:
            refused(student, f"UPDATE {table} SET {columns[table]} = DEFAULT")
            refused(student, f"INSERT INTO {table} DEFAULT VALUES")
            refused(student, f"DELETE FROM {table}")
            refused(student, f"TRUNCATE {table}")
        refused(student, f"DO $$ BEGIN LOCK TABLE {table}; END $$")
        refused(student, f"COPY (SELECT * FROM {table}) TO STDOUT")


OTHER_THINGS = (
    "CREATE TABLE shoal.mine (a int)",
    "CREATE TABLE public.mine (a int)",
    "CREATE TEMP TABLE mine (a int)",
    "CREATE SCHEMA mine",
    "CREATE FUNCTION shoal.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE ROLE mine",
    "CREATE DATABASE mine",
    "DROP SCHEMA shoal CASCADE",
    "SELECT nextval('shoal.unit_queue')",
    "SELECT setval('shoal.unit_queue', 1)",
    "SELECT lo_create(0)",
    "SELECT pg_read_file('postgresql.conf')",
    "COPY (SELECT 1) TO PROGRAM 'true'",
    "ALTER SYSTEM SET fsync = off",
    "SELECT rolpassword FROM pg_authid",
    "SET ROLE coordinator",
    "ALTER FUNCTION shoal.claim OWNER TO student",
)


def test_nothing_else_is_a_students_either(student: psycopg.Connection[tuple[object, ...]]) -> None:
    for statement in OTHER_THINGS:
        refused(student, statement)


def test_a_student_calls_what_it_needs_and_no_other_function(database: Database, student: psycopg.Connection[tuple[object, ...]]) -> None:
    functions = {name for (name,) in database.rows("SELECT proname FROM pg_proc WHERE pronamespace = 'shoal'::regnamespace")}
    allowed = "SELECT proname FROM pg_proc WHERE pronamespace = 'shoal'::regnamespace AND has_function_privilege('student', oid, 'EXECUTE')"
    assert {name for (name,) in database.rows(allowed)} == set(schema.STUDENTS_FUNCTIONS)
    assert {
        "attach_frames",
        "release_frames",
        "requeue_unit",
        "requeue_expired",
        "requeue_units_of",
        "worker_with_secret",
        "drop_requests",
        "orphans",
    } < functions
    refused(student, "SELECT shoal.release_frames('{}')")
    refused(student, "SELECT shoal.attach_frames('{}', '{}')")
    refused(student, "SELECT shoal.requeue_unit(1, '', true)")
    refused(student, "SELECT * FROM shoal.orphans()")


def test_functions_with_the_owners_rights_choose_their_own_schema(database: Database) -> None:
    """A student's search_path must not lead them to a student's table."""
    rows = database.rows("SELECT proname, proconfig FROM pg_proc WHERE pronamespace = 'shoal'::regnamespace")
    assert [name for name, config in rows if "search_path=shoal, pg_temp" not in (config or [])] == []


def test_others_leases_answers_and_uploads_are_out_of_reach(database: Database) -> None:
    server = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=1000)
    mine, other = (LeaseClient(database.conninfo("student"), poll_interval_s=1.0) for _ in range(2))
    mine.join("mine", {})
    other.join("other", {})
    server.issue(1, [(0, 0, 1)], 100.0, 3)
    (unit,) = mine.claim(1, 0.0)
    guess = unit._replace(lease=uuid.uuid4())
    other.return_unit(guess)
    other.fail_unit(guess, "")
    assert other.submit(guess, {}, [b"x"]) == "late"
    assert mine.submit(unit, {}, [b"mine"]) == "accepted"
    ((blob,),) = database.rows("SELECT id FROM shoal.blobs")
    with database.connect("student") as student:
        with pytest.raises(errors.UniqueViolation):
            student.execute("SELECT shoal.put_part(%s, 0, 'more')", (blob,))
        with pytest.raises(errors.UniqueViolation):
            student.execute("SELECT shoal.send_request(gen_random_uuid(), 1, '', %s, '{4}')", ([blob],))
        with pytest.raises(errors.ForeignKeyViolation):
            student.execute("SELECT shoal.put_part(gen_random_uuid(), 0, 'nobody owns this')")
        assert student.execute("SELECT * FROM shoal.read_reply(gen_random_uuid(), 1)").fetchall() == []
    for desk in (mine, other):
        desk.close()
    server.close()


def test_what_is_too_large_or_not_as_announced_is_not_taken(database: Database) -> None:
    server = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=1000)
    desk = LeaseClient(database.conninfo("student"), poll_interval_s=1.0)
    desk.join(None, {})
    server.issue(1, [(0, 0, 1)], 100.0, 3)
    (unit,) = desk.claim(1, 0.0)
    with pytest.raises(Refused, match="too large"):
        desk.submit(unit, {}, [bytes(1001)])
    with pytest.raises(ShoalError):
        desk.submit(unit, {}, [b""] * 17)
    with database.connect("student") as student, pytest.raises(psycopg.Error, match="not the one announced"):
        student.execute("SELECT shoal.send_request(gen_random_uuid(), 1, '', ARRAY[gen_random_uuid()], '{4}')")
    with database.connect("student") as student, pytest.raises(psycopg.Error, match="too large"):
        student.execute("SELECT shoal.put_part(gen_random_uuid(), 0, %s)", (bytes(5_000_000),))
    assert database.rows("SELECT count(*) FROM shoal.parts") == [(0,)]
    desk.close()
    server.close()


def test_a_reader_sees_the_class_and_no_secrets(database: Database) -> None:
    with database.connect("reader") as reader:
        for table in schema.READERS_TABLES:
            reader.execute(f"SELECT * FROM shoal.{table}".encode())
        for table in sorted(set(TABLES) - set(schema.READERS_TABLES)):
            refused(reader, f"SELECT * FROM shoal.{table}")
        refused(reader, "DELETE FROM shoal.metrics")
        refused(reader, "SELECT shoal.claim(gen_random_uuid(), gen_random_uuid(), 1, 0, false, false)")


def test_a_coordinator_changes_rows_and_not_the_schema(database: Database) -> None:
    with database.connect("coordinator") as coordinator:
        refused(coordinator, "DROP TABLE shoal.units")
        refused(coordinator, "ALTER TABLE shoal.units ADD COLUMN a int")
        refused(coordinator, "INSERT INTO shoal.roles VALUES ('me', 'student')")
        refused(coordinator, "CREATE TABLE shoal.mine (a int)")


def test_a_role_of_another_kind_loses_what_it_could(database: Database) -> None:
    with database.connect() as owner:
        schema.grant(owner, "student", None, "reader")
        with database.connect("student") as connection:
            connection.execute("SELECT * FROM shoal.metrics")
            refused(connection, "SELECT shoal.message_limits()")
        schema.grant(owner, "student", None, "student")
        with pytest.raises(ShoalError, match="no kind of role"):
            schema.grant(owner, "student", None, "teacher")
        with pytest.raises(ShoalError, match="needs a password"):
            schema.grant(owner, "nobody_yet", None, "student")


def test_a_role_is_granted_while_a_student_enrolls(database: Database) -> None:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    verifier = "SCRAM-SHA-256$4096:c2FsdA==$" + ":".join([base64.b64encode(bytes(32)).decode()] * 2)
    with database.connect() as owner, database.connect() as teacher, database.connect("class") as newcomer:
        with ThreadPoolExecutor(1) as thread:
            with newcomer.transaction():
                newcomer.execute("SELECT shoal.enroll('newcomer', %s)", (verifier,))
                granted = thread.submit(schema.grant, teacher, "class", None, "class")
                while not granted.done() and owner.execute(waiting, (teacher.info.backend_pid,)).fetchone() != (1,):
                    pass
            granted.result()
        owner.execute("SELECT shoal.drop_student('student-newcomer')")  # roles belong to the whole server


# --- who is not let in --------------------------------------------------------------------------------------


def test_a_wrong_password_is_refused_and_a_missing_server_is_not(database: Database) -> None:
    right = database.conninfo("student")
    for conninfo in (right.replace(":correct", ":wrong"), right.replace(database.name, f"{database.name}_no")):
        client = PostgresClient(conninfo, max_frame_bytes=1000)
        with pytest.raises(Refused, match=r"the password is wrong|there is no database") as problem:
            client.call(Message({}), PATIENCE_S)
        assert "correct-horse" not in str(problem.value)
        client.close()
    desk = LeaseClient("postgresql://student:pw@127.0.0.1:1/none", poll_interval_s=1.0, patience_s=0.2)
    with pytest.raises(Unreachable, match="no PostgreSQL answers at"):
        desk.join(None, {})
    desk.close()


def test_who_may_not_is_told_whom_to_ask(database: Database) -> None:
    desk = LeaseClient(database.conninfo("reader"), poll_interval_s=1.0)
    with pytest.raises(Refused, match="shoal db grant"):
        desk.join(None, {})
    desk.close()
    with pytest.raises(Refused, match="shoal db grant"):
        PostgresServer(database.conninfo("student"), max_frame_bytes=1000)
