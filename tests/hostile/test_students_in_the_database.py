"""Students who try to spoil a class, with nothing but what a student is given: PostgreSQL or our functions bound what they cost others."""

from __future__ import annotations

import contextlib
import io
import queue
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import errors
from rich.console import Console

from shoal.cli.status import _drawn
from shoal.coordinator.units.database_leases import DatabaseNotes
from shoal.transports import Message, Refused
from shoal.transports.database_address import Access, parse
from shoal.transports.postgres import LeaseClient, PostgresServer, schema
from shoal.transports.postgres.access import connect
from shoal.transports.postgres.enrolment import own_access
from shoal.transports.postgres.queries import look
from tests.support.eventually import eventually
from tests.support.postgres_server import Database, PostgresProcess
from tests.support.students import connected, dismiss, enrolled
from tests.support.transport_harness import PATIENCE_S


def desk_of(student: Access, name: str) -> LeaseClient:
    desk = LeaseClient(student.address, poll_interval_s=0.1)
    desk.join(name, {})
    return desk


def issue(server: PostgresServer, count: int, iteration: int = 1, timeout_s: float = 100.0, quorum: int | None = None) -> None:
    server.issue(iteration, [(0, n, 1) for n in range(count)], timeout_s, 3, quorum)


# --- a role of one's own ------------------------------------------------------------------------------------


def test_the_class_token_makes_a_role_for_each_student_and_nothing_else(
    database: Database, mia: Access, eve: Access, tmp_path: Path
) -> None:
    assert (mia.user, eve.user) == ("student-mia", "student-eve")
    assert mia.password != eve.password
    assert enrolled(database, "mia", tmp_path / "mia") == mia, "who comes again is the same student"
    assert enrolled(database, "mia", tmp_path / "other").user == "student-mia-2", "a name that is taken stays whose it is"
    with database.connect("class") as door:
        for statement in ("SELECT shoal.claim(gen_random_uuid(), gen_random_uuid(), 1, 0, false, false)", "SELECT * FROM shoal.read_run()"):
            with pytest.raises(errors.InsufficientPrivilege):
                door.execute(statement.encode())
        with pytest.raises(psycopg.Error, match="comes as its SCRAM verifier"):
            door.execute("SELECT shoal.enroll('ann', 'a password in the clear')")
    dismiss(database, mia._replace(user="student-mia-2"))


def test_nobody_enrols_as_a_role_that_is_there(database: Database) -> None:
    for name in ("admin'; DROP SCHEMA shoal --", "../admin", "a" * 41, ""):
        with database.connect("class") as door, pytest.raises(psycopg.Error, match="a name has"):
            door.execute("SELECT shoal.enroll(%s, 'SCRAM-SHA-256$1:a$b:c')", (name,))
    assert database.rows("SELECT count(*) FROM pg_roles WHERE rolname = 'admin'") == [(1,)]


def flood(database: Database, count: int, **columns: str) -> None:
    """So many roles that came with the class's token and did nothing."""
    with database.connect() as owner, owner.transaction():
        for number in range(count):
            owner.execute(f'CREATE ROLE "flood-{number}"'.encode())
        values = {"enrolled_at": "now() - n * interval '1 ms'", "enrolled_from": "'127.0.0.1'"} | columns
        rows = f"SELECT 'flood-' || n, 'student', {', '.join(values.values())} FROM generate_series(0, {count - 1}) n"
        owner.execute(f"INSERT INTO shoal.roles (name, kind, {', '.join(values)}) {rows}".encode())


@pytest.fixture
def clear(database: Database) -> Iterator[None]:
    """Roles are the whole server's: the next test has none of them."""
    yield
    with database.connect() as owner:
        found = owner.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE 'flood-%' OR rolname LIKE 'student-%'").fetchall()
        for (role,) in found:
            owner.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"'.encode())


def students(database: Database) -> int:
    return int(database.rows("SELECT count(*) FROM shoal.roles WHERE kind = 'student'")[0][0])


@pytest.mark.usefixtures("clear")
@pytest.mark.parametrize(
    ("count", "address"), [(375, "'127.0.0.1'"), (499, "'10.0.0.' || n % 3")], ids=["one address", "the whole class, from three addresses"]
)
def test_a_flood_of_enrolments_keeps_nobody_out_and_the_oldest_idle_role_makes_room(
    database: Database, server: PostgresServer, tmp_path: Path, count: int, address: str
) -> None:
    flood(database, count, enrolled_from=address)
    before = students(database)
    honest = enrolled(database, "mia", tmp_path)
    assert students(database) == before
    assert database.rows("SELECT count(*) FROM pg_roles WHERE rolname = %s", f"flood-{count - 1}") == [(0,)], "the one that came first"
    (note,) = server.notes()
    assert f"flood-{count - 1}, who never handed anything in, made room for a new one" in note
    connected(honest).close()


@pytest.mark.usefixtures("clear")
def test_who_is_at_work_or_just_connected_keeps_its_role_whoever_enrols(database: Database, server: PostgresServer, tmp_path: Path) -> None:
    issue(server, 2)
    worked, waits = enrolled(database, "mia", tmp_path / "mia"), enrolled(database, "ann", tmp_path / "ann")
    desk, other = desk_of(worked, "mia"), connected(waits)
    (unit,) = desk.claim(1, 0.0)
    assert desk.submit(unit, {}, [b"x"]) == "accepted"
    desk.close()
    with database.connect() as owner:
        owner.execute("UPDATE shoal.roles SET enrolled_at = now() - interval '5 min'")
        owner.execute("UPDATE shoal.workers SET seen_at = now() - interval '1 day'")
    flood(database, 373)
    for number in range(3):
        enrolled(database, f"late-{number}", tmp_path / f"{number}")
    left = {name for (name,) in database.rows("SELECT name FROM shoal.roles WHERE kind = 'student'")}
    assert {"student-mia", "student-ann", "student-late-0", "student-late-1", "student-late-2"} < left
    assert enrolled(database, "mia", tmp_path / "mia") == worked
    with database.connect() as owner:
        owner.execute("UPDATE shoal.roles SET enrolled_at = now() - interval '1 hour' WHERE name LIKE 'student-ann'")
        owner.execute("DELETE FROM shoal.roles WHERE name LIKE 'flood-%' OR name LIKE 'student-late-%'")
        owner.execute("INSERT INTO shoal.roles SELECT 'worked-' || n, 'student', now(), '127.0.0.1' FROM generate_series(1, 373) n")
        owner.execute(
            "INSERT INTO shoal.workers (name, secret, about, completed, role)"
            " SELECT 'worked-' || n, gen_random_uuid(), '{}', 1, 'worked-' || n FROM generate_series(1, 373) n"
        )
    newest = enrolled(database, "newest", tmp_path / "newest")
    with pytest.raises(psycopg.OperationalError):
        other.execute("SELECT 1")
    assert newest.user == "student-newest", "who is connected for an hour and has handed nothing in makes room last of all"
    with database.connect() as owner:
        owner.execute("UPDATE shoal.roles SET enrolled_at = now() WHERE name = 'student-newest'")
    with connected(newest), pytest.raises(Refused, match="375 students from your address already, and all are at work"):
        enrolled(database, "one-too-many", tmp_path / "more")


@pytest.mark.usefixtures("clear")
def test_a_student_whose_role_made_room_gets_a_new_one_and_hears_of_it(database: Database, tmp_path: Path) -> None:
    first = enrolled(database, "mia", tmp_path)
    dismiss(database, first)
    told: list[str] = []
    again = own_access(parse(database.conninfo("class")), "mia", tmp_path, PATIENCE_S, told.append)
    assert told == ["the class does not know `student-mia` any more: it may have been dropped for another. The new role is `student-mia`"]
    connected(again).close()


@pytest.mark.usefixtures("clear")
def test_a_role_that_made_room_leaves_nothing_to_the_next_one_of_its_name(
    database: Database, server: PostgresServer, tmp_path: Path
) -> None:
    issue(server, 5)
    hostile = enrolled(database, "mia", tmp_path / "hostile")
    desk = desk_of(hostile, "mia")
    for unit in desk.claim(5, 0.0):
        desk.fail_unit(unit, "broken")
    desk.close()
    with database.connect() as owner:
        owner.execute("SELECT shoal.quarantine('student-mia', 'so')")
    dismiss(database, hostile)
    honest = desk_of(enrolled(database, "mia", tmp_path / "honest"), "mia")
    assert len(honest.claim(5, 0.0)) == 5, "no pause, no quarantine, no failures of another one"
    assert database.rows("SELECT count(*), sum(times) FROM shoal.failures") == [(5, 5)], "what was tried in vain stays counted"
    honest.close()


def test_who_stays_in_the_doorway_is_put_out(database: Database) -> None:
    with contextlib.closing(database.connect("class")) as door, database.connect() as owner:
        owner.execute("SELECT shoal.end_slow_enrollments()")
        assert door.execute("SELECT 1").fetchone() == (1,)
        owner.execute("SELECT shoal.end_slow_enrollments(0)")
        with pytest.raises(psycopg.OperationalError):
            door.execute("SELECT 1")


def test_students_stay_students_when_the_run_is_deleted(database: Database, mia: Access) -> None:
    with database.connect() as owner:
        schema.reset(owner)
    assert database.rows("SELECT enrolled_at IS NOT NULL, enrolled_from FROM shoal.roles WHERE name = %s", mia.user) == [
        (True, "127.0.0.1")
    ], "so they still make room"


def test_passwords_are_neither_derived_nor_in_the_servers_log(database: Database, mia: Access) -> None:
    assert mia.password is not None
    assert len(mia.password) >= 32
    with database.connect() as owner:
        owner.execute("SET log_statement = 'all'")
        schema.grant(owner, "logged", secret := secrets.token_urlsafe(12), "student")
    log = (database.server.folder / "log").read_text()
    assert "ALTER ROLE" in log
    assert secret not in log
    assert mia.password not in log
    dismiss(database, mia._replace(user="logged"))


FORBIDDEN = (
    "SELECT pg_advisory_lock(hashtext('shoal.submit'))",
    "SELECT pg_advisory_xact_lock(1)",
    "SELECT pg_try_advisory_lock_shared(1)",
    "SELECT pg_terminate_backend(1)",
    "SELECT pg_cancel_backend(1)",
    "SELECT pg_notify('shoal_work', '')",
    "SELECT lo_create(0)",
    "SELECT lo_put(1, 0, 'x')",
    "SET temp_file_limit = -1",
    "ALTER ROLE student PASSWORD 'mine'",
    "ALTER ROLE CURRENT_USER CONNECTION LIMIT 1000",
)


def test_locks_signals_and_large_objects_are_nobodys(mia: Access) -> None:
    with connected(mia) as student:
        for statement in FORBIDDEN:
            with pytest.raises(errors.InsufficientPrivilege):
                student.execute(statement.encode())
        assert student.execute("SHOW temp_file_limit").fetchone() == ("256MB",)


def test_a_student_has_eight_connections_and_its_own_limits_only(mia: Access) -> None:
    open_ones = [connected(mia) for _ in range(8)]
    with pytest.raises(psycopg.OperationalError, match="too many connections for role"):
        connected(mia)
    for one in open_ones:
        one.close()


def test_a_student_of_a_runs_own_server_reaches_no_other_database(database: Database, mia: Access) -> None:
    with database.connect() as owner, owner.transaction(force_rollback=True):
        schema.close_other_databases(owner)
        others = owner.execute(
            "SELECT datname FROM pg_database WHERE datallowconn AND has_database_privilege(%s, oid, 'CONNECT')", (mia.user,)
        ).fetchall()
    assert others == [(database.name,)]


@pytest.fixture
def teacher(postgres: PostgresProcess) -> Iterator[str]:
    """The owner of a database of their own. Roles are the whole server's: no other test meets those that were made here."""
    with postgres.connect("postgres") as admin:
        admin.execute("CREATE ROLE teacher LOGIN CREATEROLE PASSWORD 'correct-horse'")
        admin.execute("CREATE DATABASE school OWNER teacher")
        yield "teacher"
        admin.execute("DROP DATABASE school WITH (FORCE)")
        made = admin.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE 'student-%' OR rolname = 'room'").fetchall()
        for role in (*(name for (name,) in made), "teacher"):
            admin.execute(f'DROP ROLE "{role}"'.encode())


@pytest.mark.usefixtures("teacher")
def test_an_owner_without_superuser_rights_learns_what_is_missing_and_has_a_watchdog(postgres: PostgresProcess, tmp_path: Path) -> None:
    with psycopg.connect(postgres.conninfo("teacher", "school"), autocommit=True) as teacher:
        schema.init(teacher)
        missing = " ".join(schema.missing_protections(teacher))
        assert "only a superuser can bound temporary files" in missing
        assert "students can also connect to" in missing
        schema.grant(teacher, "room", "correct-horse", "class")
        mia = own_access(parse(postgres.conninfo("room", "school")), "mia", tmp_path, PATIENCE_S)
        with connected(mia) as student:
            teacher.execute("SELECT shoal.end_harmful_connections(ARRAY[%s::int])", (student.info.backend_pid,))
            with pytest.raises(psycopg.OperationalError):
                student.execute("SELECT 1")


# --- work that is taken and not done -------------------------------------------------------------------------


def test_one_student_who_takes_all_and_fails_all_costs_the_class_no_unit(server: PostgresServer, mia: Access, eve: Access) -> None:
    issue(server, 40)
    honest, hostile = desk_of(mia, "mia"), desk_of(eve, "eve")
    assert len(hostile.claim(1000, 0.0)) == 8, "a student holds eight units at most"
    for _ in range(100):
        for unit in hostile.claim(1000, 0.0):
            hostile.fail_unit(unit, "no")
    hostile.leave()
    assert server.table()["failed"] == 0
    done = 0
    while units := honest.claim(8, 0.0):
        done += [honest.submit(unit, {}, [b"x"]) for unit in units].count("accepted")
    assert done == 40
    for desk in (honest, hostile):
        desk.close()


def test_a_student_who_enrols_again_and_again_costs_no_unit_and_is_quarantined(
    database: Database, server: PostgresServer, mia: Access, tmp_path: Path
) -> None:
    issue(server, 40)
    honest = desk_of(mia, "mia")
    roles = [enrolled(database, f"eve{n}", tmp_path / f"eve{n}") for n in range(24)]
    hostile = [desk_of(role, f"eve{n}") for n, role in enumerate(roles)]
    for desk in hostile:
        for unit in desk.claim(1000, 0.0):
            desk.fail_unit(unit, "no")
    assert server.table()["failed"] == 0, "mia has not tried them"
    done = 0
    while units := honest.claim(8, 0.0):
        done += [honest.submit(unit, {}, [b"x"]) for unit in units].count("accepted")
    assert done == 40
    for request in server.poll(0):
        server.consume(request)
    server.issue(2, [(1, 0, 1)], 100.0, 3)
    said = [note for note in server.notes() if "is in quarantine: 8 units failed there that others managed" in note]
    assert len(said) == 24
    for desk in (honest, *hostile):
        desk.close()
    for role in roles:
        dismiss(database, role)


def test_who_fails_what_others_manage_is_put_in_quarantine_and_both_sides_hear_why(
    database: Database, server: PostgresServer, mia: Access, eve: Access
) -> None:
    issue(server, 4)
    honest, hostile = desk_of(mia, "mia"), desk_of(eve, "eve")
    for unit in hostile.claim(4, 0.0):
        hostile.fail_unit(unit, "nothing works")
    assert hostile.claim(4, 0.0) == [], "others are asked first for what failed here"
    for unit in honest.claim(4, 0.0):
        assert honest.submit(unit, {}, [b"x"]) == "accepted"
    for request in server.poll(0):
        server.consume(request)
    issue(server, 4, iteration=2)
    (note,) = server.notes()
    assert "student-eve is in quarantine: 4 units failed there that others managed" in note
    with pytest.raises(Refused, match="you are in quarantine: 4 units failed there that others managed") as problem:
        hostile.claim(1, 0.0)
    assert problem.value.reason == "quarantined"
    with database.connect() as owner:
        schema.grant(owner, eve.user, None, "student")
    assert hostile.claim(1, 0.0), "whom the teacher lets in again works again"
    for desk in (honest, hostile):
        desk.close()


def test_a_unit_that_every_student_failed_waits_for_another_and_is_then_given_up(
    database: Database, server: PostgresServer, mia: Access, eve: Access
) -> None:
    issue(server, 1)
    desks = [desk_of(mia, "mia"), desk_of(eve, "eve")]
    for attempt in range(3):
        first, other = desks if attempt % 2 == 0 else reversed(desks)
        (unit,) = first.claim(1, 0.0)
        first.fail_unit(unit, "out of memory")
        if attempt == 0:
            assert first.claim(1, 0.0) == [], "the other one has not tried it"
    assert (server.table()["failed"], other.claim(1, 0.0)) == (0, []), "it may be that both are hostile"
    (told,) = server.notes()
    assert "a unit failed 3 times, and no student here has completed one yet: out of memory. Such units wait 400 s" in told
    with database.connect() as owner:
        owner.execute("UPDATE shoal.failures SET at = at - interval '401 s', first_at = first_at - interval '401 s'")
    (unit,) = other.claim(1, 0.0)
    other.fail_unit(unit, "out of memory")
    assert server.table()["failed"] == 1
    for desk in desks:
        desk.close()


def test_a_failed_unit_returns_to_its_student_after_a_lease_though_another_idles(
    database: Database, server: PostgresServer, mia: Access, eve: Access
) -> None:
    issue(server, 1, timeout_s=1000.0)
    tried, idle = desk_of(mia, "mia"), desk_of(eve, "eve")
    (unit,) = tried.claim(1, 0.0)
    tried.fail_unit(unit, "out of memory")
    assert tried.claim(1, 0.0) == []
    with database.connect() as owner:
        owner.execute("UPDATE shoal.failures SET at = at - interval '1001 s'")
    assert len(tried.claim(1, 0.0)) == 1
    for desk in (tried, idle):
        desk.close()


def test_after_five_failures_in_a_row_a_student_waits_and_is_told_for_how_long(
    database: Database, server: PostgresServer, eve: Access
) -> None:
    issue(server, 10)
    hostile = desk_of(eve, "eve")
    for unit in hostile.claim(5, 0.0):
        hostile.fail_unit(unit, "broken")
    with database.connect() as owner:  # however slow this machine is, the five seconds are not over
        owner.execute("UPDATE shoal.standings SET paused_until = paused_until + interval '1 hour'")
    assert hostile.claim(5, 0.0) == []
    assert "5 units in a row failed here" in str(hostile.why_no_work())
    assert [note for note in server.notes() if "5 units in a row failed at student-eve (broken)" in note]
    hostile.close()


def test_a_unit_that_is_held_for_ever_is_given_to_who_has_nothing_to_do(
    database: Database, server: PostgresServer, mia: Access, eve: Access
) -> None:
    issue(server, 1, timeout_s=1000.0)
    honest, hostile = desk_of(mia, "mia"), desk_of(eve, "eve")
    (kept,) = hostile.claim(1, 0.0)
    assert honest.claim(1, 0.0) == []
    with database.connect() as owner:
        owner.execute("UPDATE shoal.units SET claimed_at = claimed_at - interval '1100 s'")
    hostile.heartbeat("computing", {})
    (unit,) = honest.claim(1, 0.0)
    assert honest.submit(unit, {}, [b"x"]) == "accepted"
    assert hostile.submit(kept, {}, [b"x"]) == "late"
    (told,) = [note for note in server.notes() if "has held a unit" in note]
    held = re.search(r"eve has held a unit for (\d+) s, longer than others need, and another student has nothing to do", told)
    assert held is not None, told
    assert int(held[1]) >= 1100
    for desk in (honest, hostile):
        desk.close()


def test_nobody_takes_the_name_of_another_student(server: PostgresServer, database: Database, mia: Access, eve: Access) -> None:
    honest, hostile = desk_of(mia, "mia"), LeaseClient(eve.address, poll_interval_s=0.1)
    with database.connect() as owner:
        owner.execute("UPDATE shoal.workers SET seen_at = now() - interval '1 day'")
    assert hostile.join("mia", {}) == "mia-2"
    for desk in (honest, hostile):
        desk.close()


def test_one_student_brings_sixteen_names_at_most(server: PostgresServer, eve: Access) -> None:
    with connected(eve) as student:
        for number in range(16):
            student.execute("SELECT shoal.join_run(gen_random_uuid(), %s, '{}')", (f"n{number}",))
        with pytest.raises(psycopg.Error, match="too many workers"):
            student.execute("SELECT shoal.join_run(gen_random_uuid(), 'more', '{}')")


# --- what fills the disk, and what holds others up --------------------------------------------------------------


def test_an_upload_that_never_ends_is_cut_off(server: PostgresServer, eve: Access) -> None:
    with connected(eve) as student:
        student.execute("BEGIN")
        with pytest.raises(psycopg.Error, match="a message of more than"):
            student.execute(
                "SELECT shoal.put_part(gen_random_uuid(), 0, convert_to(repeat('x', 50000), 'UTF8')) FROM generate_series(1, 100)"
            )
        student.execute("ROLLBACK")


def test_questions_that_nobody_answers_are_bounded(server: PostgresServer, eve: Access) -> None:
    with connected(eve) as student:
        for _ in range(16):
            student.execute("SELECT shoal.send_request(gen_random_uuid(), 1, 'x', '{}', '{}')")
        with pytest.raises(psycopg.Error, match="16 questions at a time"):
            student.execute("SELECT shoal.send_request(gen_random_uuid(), 1, 'x', '{}', '{}')")


def test_who_holds_up_others_is_disconnected_and_the_fifth_time_shut_out(
    database: Database, server: PostgresServer, mia: Access, eve: Access
) -> None:
    """The lock that one result at a time holds can be kept by a transaction that does not end."""
    issue(server, 8, quorum=8)
    honest, hostile = desk_of(mia, "mia"), desk_of(eve, "eve")
    units = hostile.claim(1, 0.0)
    with connected(eve) as keeper:
        keeper.execute("BEGIN")
        keeper.execute("SELECT shoal.fail_unit(%s, %s, %s, '')", (hostile._secret, units[0].id, units[0].lease))
        keeper.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        with database.connect() as owner:
            owner.execute("SELECT shoal.end_harmful_connections(ARRAY[%s::int])", (keeper.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            keeper.execute("SELECT 1")
    (unit,) = honest.claim(1, 0.0)
    assert honest.submit(unit, {}, [b"x"]) == "accepted"
    with database.connect() as owner:
        owner.execute("UPDATE shoal.standings SET ended = 4 WHERE role = %s", (eve.user,))
        with connected(eve) as again:
            owner.execute("SELECT shoal.end_harmful_connections(ARRAY[%s::int])", (again.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError, match="not permitted to log in"):
        connected(eve)
    assert [note for note in server.notes() if "student-eve is in quarantine: 5 of its connections had to be ended" in note]
    for desk in (honest, hostile):
        desk.close()


@pytest.mark.parametrize(
    ("statement", "state", "times", "said"),
    [
        ("SELECT 1", "idle in transaction", "p_idle => 0", "it left a transaction open for 0 s"),
        ("SELECT pg_sleep(600)", "active", "p_busy => 0", "it kept the server busy for 0 s"),
        ("SELECT 1", "idle in transaction", "p_open => 0", "a transaction took 0 s"),
    ],
)
def test_the_watchdog_ends_what_takes_longer_than_its_time_and_lets_it_be_before(
    database: Database, server: PostgresServer, eve: Access, statement: str, state: str, times: str, said: str
) -> None:
    with (
        contextlib.closing(connected(eve)) as student,
        database.connect() as owner,
        in_a_thread(lambda: [student.execute(text.encode()) for text in ("BEGIN", statement)]) as problems,
    ):
        pid, now = student.info.backend_pid, "SELECT state, query FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: owner.execute(now, (pid,)).fetchone() == (state, statement))  # a transaction idles before its statement, too
        owner.execute("SELECT shoal.end_harmful_connections()")
        assert (server.notes(), problems.empty()) == ([], True), "all is well within the usual times"
        owner.execute(f"SELECT shoal.end_harmful_connections({times})".encode())
        assert server.notes() == [f"warning: a connection of {eve.user} was ended: {said}"]
        eventually(lambda: not owner.execute("SELECT FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchall())


def test_the_watchdog_ends_who_holds_up_others_and_those_go_on(
    database: Database, server: PostgresServer, mia: Access, eve: Access
) -> None:
    issue(server, 8, quorum=8)
    honest, hostile = desk_of(mia, "mia"), desk_of(eve, "eve")
    (unit,), (kept,) = honest.claim(1, 0.0), hostile.claim(1, 0.0)
    server._heartbeat.close()  # the coordinator's own watchdog would end it after five seconds, which a slow machine takes for this
    with contextlib.closing(connected(eve)) as keeper, database.connect() as owner:
        keeper.execute("BEGIN")
        handed_in = (hostile._secret, kept.id, kept.lease, kept.iteration, b"x")
        keeper.execute("SELECT shoal.submit(%b, %b::int8, %b, %b::int8, %b, '{}', '{}', false)", handed_in)
        keeper.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        with in_a_thread(lambda: honest.submit(unit, {}, [b"x"])) as outcome:
            eventually(lambda: bool(owner.execute("SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchall()))
            owner.execute("SELECT shoal.end_harmful_connections(p_blocking => %s)", (PATIENCE_S,))
            assert server.notes() == []
            owner.execute("SELECT shoal.end_harmful_connections(p_blocking => 0)")
            assert outcome.get(timeout=PATIENCE_S) == "accepted"
        assert f"warning: a connection of {eve.user} was ended: it held up others" in server.notes()
    for desk in (honest, hostile):
        desk.close()


@contextlib.contextmanager
def in_a_thread(work: Callable[[], object]) -> Iterator[queue.SimpleQueue[object]]:
    """What came of it, once it has come. The thread ends before its connection is closed: psycopg closes one that another thread waits
    on, and the next connection, which gets the same descriptor, is then lost with "server closed the connection unexpectedly"."""
    found: queue.SimpleQueue[object] = queue.SimpleQueue()

    def run() -> None:
        try:
            if (result := work()) is not None and not isinstance(result, list):
                found.put(result)
        except Exception as problem:  # the test looks at it
            found.put(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        thread.join(PATIENCE_S)


def test_only_students_are_watched(database: Database, server: PostgresServer) -> None:
    with database.connect() as owner, database.connect("coordinator") as coordinator:
        owner.execute("SELECT shoal.end_harmful_connections(ARRAY[%s::int])", (coordinator.info.backend_pid,))
        assert coordinator.execute("SELECT 1").fetchone() == (1,)


# --- clocks ---------------------------------------------------------------------------------------------------


def test_clocks_of_leases_stand_still_while_nobody_coordinates(database: Database, mia: Access) -> None:
    first = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000)
    issue(first, 1, timeout_s=60.0)
    honest = desk_of(mia, "mia")
    (unit,) = honest.claim(1, 0.0)
    first.close()
    with database.connect() as owner:
        owner.execute("UPDATE shoal.coordinator SET beat_at = beat_at - interval '1 hour'")
    second = PostgresServer(database.conninfo("coordinator"), max_frame_bytes=10_000)
    assert honest.submit(unit, {}, [b"x"]) == "accepted"
    honest.close()
    second.close()


def test_a_unit_that_takes_longer_than_the_timeout_is_told_with_what_to_set(
    database: Database, server: PostgresServer, mia: Access
) -> None:
    issue(server, 1, timeout_s=1000.0)
    honest = desk_of(mia, "mia")
    (unit,) = honest.claim(1, 0.0)
    with database.connect() as owner:
        owner.execute("UPDATE shoal.units SET claimed_at = claimed_at - interval '1400 s'")
    honest.heartbeat("computing", {})
    honest.heartbeat("computing", {})
    (note,) = server.notes()
    took = re.search(r"mia has computed one unit for (\d+) s, longer than the timeout of 1000 s", note)
    assert took is not None, note
    assert int(took[1]) >= 1400
    assert "lease_timeout_s" in note
    assert honest.submit(unit, {}, [b"x"]) == "accepted"
    honest.close()


# --- results that would come too late -----------------------------------------------------------------------


def test_three_equal_students_with_a_quorum_of_three_hand_in_nothing_late(
    database: Database, server: PostgresServer, mia: Access, eve: Access
) -> None:
    """A unit that could not be finished before the round closes is not begun."""
    desks = {name: desk_of(who, name) for name, who in (("a", mia), ("b", mia), ("c", eve))}
    with database.connect() as owner:
        owner.execute("UPDATE shoal.workers SET unit_s = 10")
    issue(server, 30, quorum=3)
    held = {name: desk.claim(1, 0.0)[0] for name, desk in desks.items()}
    assert desks["a"].submit(held["a"], {}, [b"x"]) == "accepted"
    with database.connect() as owner:
        owner.execute("UPDATE shoal.workers SET unit_s = 10")
    assert desks["a"].claim(1, 0.0) == [], "b and c are expected before a could finish another"
    with database.connect() as owner:
        owner.execute("UPDATE shoal.workers SET unit_s = 100 WHERE name = 'c'")
        owner.execute("UPDATE shoal.workers SET unit_s = 10 WHERE name = 'a'")
    assert desks["a"].claim(1, 0.0), "c is slow: another unit is done meanwhile"
    for desk in desks.values():
        desk.close()


def test_a_lease_is_a_secret(server: PostgresServer, mia: Access, eve: Access) -> None:
    issue(server, 1)
    honest, hostile = desk_of(mia, "mia"), desk_of(eve, "eve")
    (unit,) = honest.claim(1, 0.0)
    hostile.fail_unit(unit._replace(lease=uuid.uuid4()), "mine")
    assert honest.submit(unit, {}, [b"x"]) == "accepted"
    for desk in (honest, hostile):
        desk.close()


# --- what people see ----------------------------------------------------------------------------------------


def test_a_student_who_comes_and_goes_all_the_time_hides_no_warning(database: Database, server: PostgresServer, eve: Access) -> None:
    notes = DatabaseNotes(server)
    with database.connect() as owner:
        owner.execute("SELECT shoal.add_note('eve left: spam ' || n) FROM generate_series(1, 300) n")
        owner.execute("SELECT shoal.add_note('warning: something else')")
    told = notes.read(1.0)
    assert told[0] == "warning: something else"
    assert (len(told), told[-1]) == (201, "101 more notes came from the database")
    with database.connect() as owner:
        owner.execute("SELECT shoal.add_note('warning: one more')")
    assert notes.read(1.5) == [], "it is asked once a second"
    assert notes.read(3.0) == ["warning: one more"]


def test_what_a_student_says_of_itself_steers_no_terminal(database: Database, server: PostgresServer, eve: Access) -> None:
    issue(server, 6)
    hostile = desk_of(eve, "eve")
    with pytest.raises(Refused, match="not plain text"):
        hostile.heartbeat("\x1b[2Jcomputing", {})
    hostile.heartbeat("[/] [red]computing", {})
    for unit in hostile.claim(5, 0.0):
        hostile.fail_unit(unit, "\x1b]0;owned\x07")
    hostile.close()
    assert DatabaseNotes(server).read(1.0) == ["warning: 5 units in a row failed at student-eve (?]0;owned?): it gets no more for 5 s"]
    with connect(parse(database.conninfo("admin"))) as owner:
        server.open_run(Message({}), resume=False)
        view = look(owner)
    assert view is not None
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    console.print(_drawn(view))
    assert "[/] [red]computing" in console.file.getvalue()  # type: ignore[attr-defined]
