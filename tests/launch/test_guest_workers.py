"""Workers that give way, as real processes: the user of their computer returns, and the run loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from shoal.cli.departure import Departure
from shoal.cli.join import _parsed
from shoal.cli.join_options import typed_parts
from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.launch import forkserver
from shoal.launch.volunteer import watcher as watching
from shoal.launch.volunteer.conditions import Conditions, Sensors, parse
from shoal.launch.volunteer.watcher import Watcher, WorkerProcess
from shoal.process_exit import PAUSED, RUN_STOPPED
from shoal.runs.folder.run_reader import RunFolder
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, LOADED_ONCE, Processes, processes_in

UNITS = {"kind": "workunits", "batches_per_unit": 1, "units_per_update": 1}
SMALL: dict[str, Any] = {
    "dialect": "shoal",
    "model": {"kind": "mlp", "hidden_sizes": [16]},
    "data": {"source": {"kind": "builtin", "name": "digits"}},
    "training": {"batch_size": 16, "max_steps": 40, "epochs": 100},
    "strategy": UNITS,
    "evaluation": {"strategy": "never"},
    "checkpoint": {"strategy": "never"},
    "coordinator": {"heartbeat_interval_s": 0.5},
    "cluster": {"num_workers": 1},
}
ENDLESS = {"batch_size": 16, "max_steps": 10_000_000}
XMLRPC = {"transport": {"kind": "xmlrpc"}}
POSTGRES = {"transport": {"kind": "postgres", "host": "embedded"}}


class Person:
    """Whether somebody uses the computer; the rest of it is real."""

    def __init__(self) -> None:
        self.away = True

    @property
    def conditions(self) -> Conditions:
        sensors = Sensors.here()._replace(idle_s=lambda: 1e6 if self.away else 0.0)
        return Conditions(parse(["idle"]), sensors)


class ForkedWorker(WorkerProcess):
    """The same process, from the fork server of the tests, which has loaded torch once."""

    def __init__(self, arguments: list[str], first_line: str, log: Path) -> None:
        with log.open("ab") as output:
            self._process: Any = forkserver.start(
                ["-m", "shoal", *arguments], stdout=output.fileno(), stderr=output.fileno(), start_new_session=True, loads=LOADED_ONCE
            )
        self.pid = self._process.pid
        self._write(first_line)


class Guest:
    """A watcher in a thread, whose worker is a process."""

    def __init__(self, folder: Path, line: list[str], *options: str) -> None:
        self.person, self.told, self.log, self.codes = Person(), list[str](), folder / "worker.log", list[int]()
        invitation = dict(zip(("address", "token", "key"), typed_parts(_parsed(token_of(folder, line)[1:])), strict=True))
        # Of ordinary priority: beside other tests a worker with the lowest one may get no time at all
        command = ["join", "--name", "ada", "--guest", "--stdin", "--state", str(folder / "state"), *options]
        self.watcher = Watcher(self.person.conditions, lambda: ForkedWorker(command, json.dumps(invitation), self.log), self.told.append)
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        self.codes.append(self.watcher.run())

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, what: Callable[[], object], why: str) -> None:
        eventually(lambda: what() or not self.thread.is_alive(), why)
        assert what(), (why, self.codes, self.told, self.said())

    def pause(self) -> float:
        """The person returns; returns the seconds until the worker's process has ended."""
        worker = self.watcher.worker
        assert worker is not None
        began, self.person.away = time.monotonic(), False
        self.wait_for(lambda: worker.poll() is not None, "the worker's process ends")
        took_s = time.monotonic() - began
        self.wait_for(lambda: self.watcher.worker is None, "the watcher has noticed")
        assert not Path(f"/proc/{worker.pid}/status").exists() or worker.poll() is not None
        return took_s

    def close(self) -> None:
        self.watcher.stop()
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    monkeypatch.setattr(watching, "_CHECK_S", 0.05)
    with processes_in(tmp_path) as made:
        yield made


@contextlib.contextmanager
def coordinated(processes: Processes, *options: str, **layers: Any) -> Iterator[tuple[Any, list[str], Guest]]:
    """A coordinator of a small run, and a guest that works for it."""
    (processes.folder / "config.yaml").write_text(yaml.safe_dump(SMALL | layers))
    coordinator, line = processes.coordinate()
    guest = Guest(processes.folder, line, *options)
    try:
        yield coordinator, line, guest
    finally:
        guest.close()


def token_of(folder: Path, line: list[str]) -> list[str]:
    """The command for workers with the class's token, which a teacher's screen shows beside it."""
    token = folder / "run" / "class_token"
    return [*line, "--token-file", str(token)] if token.exists() else line


def state_of(folder: Path, worker: str) -> str:
    status = RunFolder(folder / "run").status()
    return next((row["state"] for row in [*status["members"], *status["gone"]] if row["worker"] == worker), "")


def version_of(folder: Path) -> int:
    return int(RunFolder(folder / "run").status()["version"])


@pytest.mark.parametrize(
    "layers",
    [
        {},
        pytest.param(POSTGRES, marks=pytest.mark.long),
        pytest.param(POSTGRES | {"strategy": {"kind": "syncps"}}, marks=pytest.mark.long),
        pytest.param(XMLRPC | {"strategy": {"kind": "syncps"}}, marks=pytest.mark.long),
        pytest.param({"strategy": {"kind": "async"}}, marks=pytest.mark.long),
        pytest.param({"strategy": {"kind": "edp"}}, marks=pytest.mark.long),
        pytest.param({"strategy": {"kind": "diloco", "inner_steps": 4}}, marks=pytest.mark.long),
        pytest.param({"strategy": {"kind": "async"}, "engine": {"kind": "ddp"}}, marks=pytest.mark.long),
    ],
    ids=["workunits", "workunits-postgres", "syncps-postgres", "syncps-xmlrpc", "async", "edp", "diloco", "ddp"],
)
def test_a_guest_gives_way_returns_and_the_run_loses_nothing(
    processes: Processes, layers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ["--slowdown", "300"]  # so that the run does not end before the person returns, on a quick machine too
    slow += ["--set", "launch.devices_per_node=2"] if "engine" in layers else []
    with coordinated(processes, *slow, **layers) as (coordinator, _, guest):
        guest.wait_for(lambda: version_of(processes.folder) >= 2, "the guest works")
        assert guest.pause() < watching.LEAVE_S
        eventually(lambda: state_of(processes.folder, "ada") == "paused: its computer is in use", "the status shows why")
        assert main(["status", str(processes.folder / "run")]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^ada +paused: its computer is in use ", shown, re.MULTILINE), shown
        assert "ada is paused: its computer is in use" in shown
        paused_at = version_of(processes.folder)
        guest.person.away = True
        guest.wait_for(lambda: version_of(processes.folder) > paused_at, "the guest works again")
        assert not state_of(processes.folder, "ada").startswith("paused")
        guest.thread.join(HANG_S)
        assert guest.codes == [0], (guest.told, guest.said())
        assert coordinator.wait(HANG_S) == 0
    assert "what the run asks" not in guest.said()
    assert guest.said().count("this run asks of this machine") == 1, "a user is not told the same twice"
    processes.audit("run")
    assert "starts again when the conditions hold" in "".join(guest.told)


@pytest.mark.parametrize("layers", [{}, pytest.param(POSTGRES, marks=pytest.mark.long)], ids=["zeromq", "postgres"])
def test_a_step_that_takes_minutes_is_left_and_its_unit_lent_again(processes: Processes, layers: dict[str, Any]) -> None:
    """Every unit is needed, and its lease would end after five minutes."""
    with coordinated(processes, "--slowdown", "100000", **layers) as (_, line, guest):
        guest.wait_for(lambda: state_of(processes.folder, "ada") == "computing", "the guest is in the middle of a step")
        assert guest.pause() < watching.KILL_S
        assert not any("was killed" in text for text in guest.told), "it left by itself"
        eventually(lambda: state_of(processes.folder, "ada") == "paused: its computer is in use", "the coordinator knows")
        other = processes.start(*token_of(processes.folder, line), "--name", "ben")
        eventually(lambda: version_of(processes.folder) > 0, "the unit was lent again")
        other.terminate()


def test_a_long_round_goes_on_where_its_worker_gave_way(processes: Processes) -> None:
    with coordinated(processes, strategy={"kind": "diloco", "inner_steps": 1_000_000}, training=ENDLESS) as (_, _, guest):
        guest.wait_for(lambda: state_of(processes.folder, "ada") == "computing", "the guest takes inner steps")
        assert guest.pause() < watching.LEAVE_S
        steps = re.search(r"saved (\d+) of 1000000 steps of round 1", guest.said())
        assert steps, guest.said()
        guest.person.away = True
        going_on = f"going on in the middle of round 1, after step {steps[1]} of 1000000"
        guest.wait_for(lambda: going_on in guest.said(), "the round goes on")


def test_a_worker_that_needs_more_than_its_memory_says_so_and_ends(processes: Processes) -> None:
    """25 million weights and what training takes beside them are more than half a gigabyte."""
    wide = {"model": {"kind": "mlp", "hidden_sizes": [5000, 5000]}, "training": {"batch_size": 16, "max_steps": 3, "epochs": 1}}
    with coordinated(processes, "--memory", "512M", **wide) as (_, _, guest):
        guest.wait_for(lambda: guest.codes, "it has ended")
        assert guest.codes == [2], guest.said()
        assert "this run needs more memory than --memory 512M allows" in guest.said()


# --- the watcher ---------------------------------------------------------------------------------------------------------

SLEEPER = "import sys; print('up', flush=True); sys.stdin.readline(); line = sys.stdin.readline(); {then}"


class Script(WorkerProcess):
    """A program in the worker's place."""

    def __init__(self, program: str) -> None:
        super().__init__([sys.executable, "-c", program], "{}")


def watched(program: str, **changed: Any) -> tuple[Watcher, Person, list[str]]:
    person, told = Person(), list[str]()
    return Watcher(person.conditions, lambda: Script(program), told.append), person, told


@pytest.mark.parametrize(("code", "ending"), [(0, 0), (2, 2), (3, 3)])
def test_the_watcher_ends_with_a_worker_whose_run_is_over(code: int, ending: int) -> None:
    watcher, _, told = watched(f"import sys; sys.exit({code})")
    assert watcher.run() == ending
    assert told == []


def test_the_watcher_looks_again_for_a_run_that_its_owner_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watching, "_RUN_STOPPED_S", 0.0)
    monkeypatch.setattr(watching, "_CHECK_S", 0.02)
    again = tmp_path / "again"
    file = repr(str(again))
    watcher, _, told = watched(f"import os, sys; sys.exit(0) if os.path.exists({file}) else open({file}, 'w') and sys.exit(5)")
    assert watcher.run() == 0
    assert told == ["the worker starts again in 0 s, in case the run goes on. Ctrl-C ends this"]


def test_a_watched_worker_exits_with_a_code_of_its_own_if_the_owner_stopped() -> None:
    departure = Departure()
    departure.joined = cast(Any, SimpleNamespace(protocol=SimpleNamespace(done=True, outcome="interrupted")))
    assert (departure.exit_code(watched=True), departure.exit_code()) == (RUN_STOPPED, 0)
    departure.joined = cast(Any, SimpleNamespace(protocol=SimpleNamespace(done=True, outcome="completed")))
    assert departure.exit_code(watched=True) == 0


def test_a_worker_that_fails_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(watching, "_CHECK_S", 0.02)
    watcher, _, told = watched("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ShoalError, match="failed 5 times in a row: it was killed by signal 9"):
        watcher.run()
    assert len(told) == 4


def test_a_worker_that_does_not_leave_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watching, "_CHECK_S", 0.02)
    monkeypatch.setattr(watching, "KILL_S", 0.3)
    child = (
        "import subprocess, sys; one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"print(one.pid, file=open({str(tmp_path / 'pid')!r}, 'w'), flush=True); one.wait()"
    )
    watcher, person, told = watched(child)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "the child runs")
    person.away = False
    eventually(lambda: any("was killed" in text for text in told), "it is killed")
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), "its child, too")
    watcher.stop()
    thread.join(HANG_S)


def test_a_worker_learns_why_it_is_asked_to_leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watching, "_CHECK_S", 0.02)
    file = tmp_path / "line"
    program = f"import sys; sys.stdin.readline(); open({str(file)!r}, 'w').write(sys.stdin.readline()); sys.exit({PAUSED})"
    watcher, person, told = watched(program)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    eventually(lambda: watcher.worker is not None, "the worker runs")
    person.away = False
    eventually(lambda: len(told) == 2, "it has left")
    assert json.loads(file.read_text()) == {"pause": "its computer is in use"}
    watcher.stop()
    thread.join(HANG_S)


@pytest.mark.parametrize("early", [True, False])
def test_what_the_user_types_reaches_the_worker_that_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, early: bool) -> None:
    monkeypatch.setattr(watching, "_CHECK_S", 0.02)
    file = tmp_path / "lines"
    program = f"import sys; sys.stdin.readline(); open({str(file)!r}, 'w').write(sys.stdin.readline() + sys.stdin.readline())"
    watcher, _, _ = watched(program)
    if early:
        watcher.answer("yes")
    thread = threading.Thread(target=watcher.run)
    thread.start()
    eventually(lambda: watcher.worker is not None or not thread.is_alive(), "the worker runs")
    if not early:
        watcher.answer("yes")
    watcher.answer(None)
    thread.join(HANG_S)
    assert file.read_text() == '{"answer": "yes"}\n{"answer": ""}\n'


def test_a_load_must_be_low_for_a_while_before_the_worker_starts_again() -> None:
    now, share, started = [0.0], [0.0], list[float]()
    sensors = Sensors.here()._replace(other_load=lambda pid: share[0])

    class Running:
        pid = 1

        def __init__(self) -> None:
            started.append(now[0])
            self.code: int | None = None

        def poll(self) -> int | None:
            return self.code

        def send(self, command: dict[str, str]) -> None:
            self.code = PAUSED

        def kill(self) -> None: ...
        def let_go(self) -> None: ...

    start: Any = Running
    watcher = Watcher(Conditions(parse(["load"]), sensors), start, lambda text: None, lambda: now[0])
    for second in range(200):
        now[0], share[0] = float(second), 0.9 if 50 <= second < 60 or second == 80 else 0.1
        watcher._turn()
    assert started == [3.0, 81.0 + 30.0], "a short program at second 80 begins the wait anew"


def test_the_watcher_is_small_and_loads_no_torch(tmp_path: Path) -> None:
    """A real process, whose hour never comes while the test runs."""
    hour = (time.localtime().tm_hour + 12) % 24
    options = ["--token", "t", "--name", "ada", "--when", f"{hour:02}:00-{hour:02}:01"]
    environ = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "join", "tcp://127.0.0.1:9", *options], stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert process.stderr is not None
        assert "Ctrl-C ends it" in process.stderr.readline()
        assert "waiting: not within" in process.stderr.readline()
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])  # type: ignore[index]
        assert resident < 40_000, "kB"
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        process.terminate()
        assert process.wait(HANG_S) == 0
        process.stderr.close()  # type: ignore[union-attr]
