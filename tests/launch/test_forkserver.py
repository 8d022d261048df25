"""Processes that are forked from one that has loaded the libraries already."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.launch import forkserver
from tests.support.eventually import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each process is started afresh")
ASKS_FOR_ANOTHER = """\
import sys
from shoal.launch import forkserver
child = forkserver.start(["inner.py"], stdout=1, cwd=sys.argv[1])
sys.exit(child.wait() + 1)
"""
TELLS = """\
import os, sys, torch
print(sys.argv, os.getcwd(), os.environ["COLOUR"], torch.get_num_threads(), "HOME" in os.environ, sys.path[0])
sys.exit(int(sys.stdin.readline()))
"""
WAITS = "import sys\nprint('here', flush=True)\nsys.stdin.read()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "tells.py": TELLS,
        "waits.py": WAITS,
        "asks.py": ASKS_FOR_ANOTHER,
        "inner.py": "print('inner')\nraise SystemExit(6)",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def started(folder: Path, *arguments: str, env: dict[str, str] | None = None, loads: Sequence[str] = ()) -> forkserver.ChildProcess:
    with (folder / "output").open("ab") as output:
        return forkserver.start(arguments, stdout=output, stderr=output, env=env, cwd=folder, loads=loads)


def wait_for_output(folder: Path, text: str) -> None:
    eventually(lambda: text in (folder / "output").read_text())


def open_files_of(pid: str) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the line of a process that an earlier test left to end by itself
            found.add(os.readlink(path))
    return found


def test_it_is_what_the_interpreter_would_have_started(folder: Path) -> None:
    process = started(folder, "tells.py", "a", env={"COLOUR": "red", "OMP_NUM_THREADS": "3"})
    process.stdin.write(b"7\n")
    process.stdin.close()
    assert process.wait(300) == process.returncode == 7
    assert (folder / "output").read_text() == f"['tells.py', 'a'] {folder} red 3 False {folder}\n"


def test_what_all_will_need_is_loaded_before_they_are_forked(folder: Path) -> None:
    """A module that is not there is for the process itself to miss."""
    (folder / "tells.py").write_text("import sys\nprint('mailbox' in sys.modules)\n")
    assert started(folder, "tells.py", loads=["mailbox", "not_there"]).wait(300) == 0
    assert (folder / "output").read_text() == "True\n"


def test_garbage_is_collected_among_its_own_objects_only(folder: Path) -> None:
    (folder / "tells.py").write_text("import gc, sys\nprint(gc.isenabled(), gc.get_freeze_count() > 10 * len(gc.get_objects()))\n")
    assert started(folder, "tells.py").wait(300) == 0
    assert (folder / "output").read_text() == "True True\n"


def test_a_signal_reaches_it_and_its_end_is_told(folder: Path) -> None:
    process = started(folder, "waits.py")
    wait_for_output(folder, "here")
    assert process.poll() is None
    title = Path(f"/proc/{process.pid}/cmdline").read_text()
    assert "waits.py" in title
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == -signal.SIGTERM
    process.kill()  # nothing happens: it has ended
    process.stdin.close()


def test_a_forked_process_uses_the_same_fork_server(folder: Path) -> None:
    process = started(folder, "asks.py", str(folder))
    assert process.wait(300) == 7, (folder / "output").read_text()
    assert (folder / "output").read_text() == "inner\n"
    process.stdin.close()


@pytest.mark.long
def test_children_outlive_the_fork_server_and_the_next_start_makes_another(folder: Path) -> None:
    first = started(folder, "waits.py")
    wait_for_output(folder, "here")
    parent = int(Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    second = started(folder, "waits.py")
    wait_for_output(folder, "here\nhere")
    assert first.poll() is None
    first.stdin.close()
    assert first.wait(300) == -signal.SIGKILL  # nobody is left who knows how it ended
    second.stdin.close()
    assert second.wait(300) == 0


def test_a_fork_server_has_no_threads_and_no_files_of_its_clients(folder: Path) -> None:
    process = started(folder, "waits.py")
    wait_for_output(folder, "here")
    parent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert len(os.listdir(f"/proc/{parent}/task")) == 1
    assert str(folder / "output") not in open_files_of(parent)
    process.stdin.close()
    assert process.wait(300) == 0


def test_a_process_with_the_pid_of_an_earlier_one_is_not_taken_for_it() -> None:
    """Pids come again after 32,768 processes: the exit code of the earlier one says nothing of the later one."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection, server = forkserver.ForkServerConnection(ours), forkserver.MessageStream(theirs)
        server.send({"pid": 7})
        first = connection.start({}, [])
        server.send({"ended": 7, "code": 3})
        server.send({"pid": 7})
        second = connection.start({}, [])
        assert first is not None
        assert second is not None
        assert (first.poll(), second.poll()) == (3, None)
        first.kill()
        server.send({"ended": 7, "code": 0})
        assert (first.poll(), second.poll()) == (3, 0)
        asked = [message for messages in iter(server.receive, []) for message in messages or ()]
        assert [*map(list, asked)] == [["start"], ["start"]], "the later one got no signal"
        for process in (first, second):
            process.stdin.close()
        ours.close()
