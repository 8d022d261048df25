"""`shoal db`, on a real server."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.transports.database_address import parse
from shoal.transports.postgres.access import Error, connect, create_database

Shoal = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shoal(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shoal:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def address(server: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database that is not there yet, one for each test."""
    name = request.node.name[:40]
    yield server.access._replace(database=name).address
    with connect(server.access) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def test_init_makes_a_database_once(shoal: Shoal, address: str) -> None:
    code, out, err = shoal("db", "status", address)
    assert (code, out) == (2, "")
    assert "`shoal db init` creates it" in err
    code, out, err = shoal("db", "init", address)
    assert code == 0
    assert re.fullmatch(r"not protected: students can also connect to .*postgres.*: REVOKE CONNECT ON DATABASE … FROM PUBLIC\n", err)
    assert re.fullmatch(r"postgresql://shoal@\S+: created, ready \(schema \d+\)\n", out)
    assert "created" not in shoal("db", "init", address)[1]


def test_the_doctor_lists_what_a_database_does_not_protect_a_class_from(
    shoal: Shoal, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.doctor.examine", lambda folder: iter(()))
    shoal("db", "init", address)
    code, out, _ = shoal("doctor", address)
    assert code == 0
    assert "not protected: students can also connect to" in out
    assert "DO" not in out, "a superuser has prepared this one"
    with connect(parse(address)) as owner:
        owner.execute("GRANT USAGE ON LANGUAGE plpgsql TO PUBLIC; GRANT EXECUTE ON FUNCTION pg_export_snapshot() TO PUBLIC")
    found = [one["detail"] for one in json.loads(shoal("doctor", address, "--json")[1])]
    assert any("students can run code on the server" in detail for detail in found)
    assert any("lock or write: pg_export_snapshot." in detail for detail in found)


def test_status_for_people_and_programs(shoal: Shoal, address: str) -> None:
    shoal("db", "init", address)
    code, out, _ = shoal("db", "status", address)
    assert (code, "none yet" in out) == (0, True)
    told = json.loads(shoal("db", "status", address, "--json")[1])
    assert told["schema_version"] >= 1
    assert told["workers"] == told["roles"] == {}
    for text in (out, json.dumps(told)):
        assert str(parse(address).password) not in text


def test_a_database_that_is_not_prepared_is_told(shoal: Shoal, address: str) -> None:
    create_database(parse(address))
    code, _, err = shoal("db", "status", address)
    assert (code, "shoal db init" in err, err.count("\n")) == (2, True, 1)


def test_grant_prints_the_line_that_a_student_needs(shoal: Shoal, address: str) -> None:
    shoal("db", "init", address)
    code, out, _ = shoal("db", "grant", "student", "ana", address)
    assert code == 0
    found = re.search(r"^  shoal join '(postgresql://ana@\S+)'\npassword .*\n  (\S+)$", out, re.MULTILINE)
    assert found
    theirs = parse(*found.groups())._replace(host="127.0.0.1")  # the front that others come through is told with the run's folder
    with connect(theirs) as connection:
        import psycopg

        for statement in ("SELECT * FROM shoal.migrations", "CREATE TABLE mine (x int)", "CREATE ROLE eve", "CREATE DATABASE eve"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
    out = shoal("db", "grant", "student", "ana", address)[1]
    assert "the password stays as it is" in out
    with connect(theirs):
        pass
    shoal("db", "grant", "student", "ana", address, "--password", "new one")
    with pytest.raises(ShoalError, match=r"the password is wrong: PostgreSQL at .* needs the password of `ana`"):
        connect(theirs)
    assert json.loads(shoal("db", "status", address, "--json")[1])["roles"] == {"ana": "student"}


def test_reset_asks_for_the_name(shoal: Shoal, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shoal("db", "init", address)
    with connect(parse(address)) as connection:
        connection.execute("CREATE TABLE shoal.leftover (x int)")

    def tables() -> str:
        return shoal("db", "status", address, "--json")[1]

    for typed in ("", "yes\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        code, _, err = shoal("db", "reset", address)
        assert (code, "nothing was deleted" in err, "leftover" in tables()) == (2, True, True)
    monkeypatch.setattr("sys.stdin", io.StringIO(parse(address).database + "\n"))
    assert shoal("db", "reset", address)[0] == 0
    assert "leftover" not in tables()
    assert shoal("db", "reset", "--yes", address)[0] == 0


def test_a_configuration_names_its_server(shoal: Shoal, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    access = parse(address)
    Path("classroom.yaml").write_text(
        f"database:\n  host: {access.host}\n  port: {access.port}\n  database: {access.database}\n  user: shoal\n"
        "  password: ${DB_PASSWORD}\ntraining:\n  num_workunits_per_update: 2\n"
    )
    monkeypatch.setenv("DB_PASSWORD", "not this")
    code, _, err = shoal("db", "init", "classroom.yaml")
    assert (code, "the password is wrong" in err, "set DB_PASSWORD" in err, "not this" not in err) == (2, True, True, True)
    monkeypatch.setenv("DB_PASSWORD", str(access.password))
    assert shoal("db", "init", "classroom.yaml")[0] == 0
    assert shoal("db", "status", access.shown)[0] == 0


def test_who_looks_at_a_database_needs_nothing_that_only_training_needs(
    shoal: Shoal, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = parse(address)
    Path("classroom.yaml").write_text(
        f"database:\n  host: {access.host}\n  port: {access.port}\n  database: {access.database}\n  user: shoal\n"
        "  password: ${DB_PASSWORD}\ntraining:\n  num_workunits_per_update: 2\n  batch_size: ${BATCH}\n"
        "huggingface:\n  enabled: true\n  repo_id: me/faces\n  token: ${HF_TOKEN}\n"
    )
    code, _, err = shoal("db", "init", "classroom.yaml")
    assert (code, err.count("is not set"), "DB_PASSWORD" in err) == (2, 1, True), "the database needs this one"
    monkeypatch.setenv("DB_PASSWORD", str(access.password))
    assert shoal("db", "init", "classroom.yaml")[0] == 0
    assert shoal("db", "status", "classroom.yaml")[0] == 0
    assert "holds no run yet" in shoal("status", "classroom.yaml")[2]
    code, _, err = shoal("config", "check", "classroom.yaml")
    assert (code, "`BATCH` is not set" in err, "`HF_TOKEN` is not set" in err) == (2, True, True), "training does need them"
    Path("classroom.yaml").write_text(Path("classroom.yaml").read_text().replace("database:\n  host", "databse:\n  host"))
    code, _, err = shoal("db", "status", "classroom.yaml")
    assert (code, "databse" in err) == (2, True), "a misspelt section would lead to another database"


def test_a_role_that_may_not_create_databases_is_told_what_to_type(shoal: Shoal, address: str, server: EmbeddedPostgres) -> None:
    with connect(server.access) as connection:
        connection.execute("CREATE ROLE plain LOGIN PASSWORD 'p'")
    code, _, err = shoal("db", "init", parse(address)._replace(user="plain", password="p").address)
    assert (code, "createdb --host" in err, "--owner plain" in err) == (2, True, True)


def test_a_run_with_a_server_of_its_own_is_named_by_its_folder(shoal: Shoal, server: EmbeddedPostgres, tmp_path: Path) -> None:
    assert shoal("db", "init", str(server.folder))[0] == 0
    Path("classroom.yaml").write_text("training:\n  num_workunits_per_update: 2\n")
    code, _, err = shoal("db", "status", "classroom.yaml")
    assert (code, "a run makes its database itself" in err) == (2, True)
    with EmbeddedPostgres(tmp_path / "runs" / "mine") as stopped:
        pass
    assert shoal("db", "init", "classroom.yaml")[0] == 0  # the newest run's, started for as long as it takes
    assert "runs/mine" in shoal("db", "status", "classroom.yaml")[2]
    assert stopped.pid is None


def test_mistakes_are_one_line(shoal: Shoal) -> None:
    assert "no command `db statsu`" in shoal("db", "statsu")[2]
    assert "transport.kind is zmq" in shoal("db", "status", "starter")[2]
    assert shoal("db", "--help")[0] == 0
    assert "no PostgreSQL answers at 127.0.0.1:1: is it running" in shoal("db", "status", "postgresql://127.0.0.1:1/x")[2]


def test_a_coordinators_and_a_readers_way_in_is_told(shoal: Shoal, address: str) -> None:
    shoal("db", "init", address)
    out = shoal("db", "grant", "reader", "projector", address, "--password", "p w")[1]
    where, _, password = (line.strip() for line in out.splitlines()[-3:])
    with connect(parse(where.removeprefix("shoal status ").strip("'"), password)._replace(host="127.0.0.1")) as connection:
        assert connection.execute("SELECT * FROM shoal.worker_list").fetchall() == []
    out = shoal("db", "grant", "coordinator", "second", address)[1]
    assert re.search(r"user: second\}\nin its environment:\n  DB_PASSWORD=\S{16}$", out.strip())


def test_who_is_shut_out_is_thrown_out_at_once(shoal: Shoal, address: str) -> None:
    shoal("db", "init", address)
    shoal("db", "grant", "student", "eve", address, "--password", "secret")
    theirs = parse(address)._replace(user="eve", password="secret")
    connection = connect(theirs)
    code, out, _ = shoal("db", "revoke", "eve", address)
    assert (code, "shut out" in out) == (0, True)
    with pytest.raises(Error):
        connection.execute("SELECT 1")
    with pytest.raises(ShoalError, match="not permitted to log in"):
        connect(theirs)
    assert "`eve` was not let in here; there are none" in shoal("db", "revoke", "eve", address)[2]
    shoal("db", "grant", "student", "eve", address, "--password", "new")
    connect(theirs._replace(password="new")).close()
