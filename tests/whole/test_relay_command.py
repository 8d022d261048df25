"""`shoal relay` as a user runs it: real processes, real sockets, and a relay that is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.processes import HANG_S, Processes, processes_in

CONFIG = """\
dialect: shoal
model: {kind: mlp, hidden_sizes: [16]}
training: {batch_size: 16, epochs: 3, optimizer: {name: SGD, learning_rate: 0.1}}
strategy: {kind: syncps, round_timeout_s: 120}
transport: {port: 0}
coordinator: {heartbeat_interval_s: 1.0}
cluster: {num_workers: 1}
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with processes_in(tmp_path) as made:
        yield made


TASKS = ("--set", "strategy.kind=async", "--set", "scheduler.kind=gale-shapley")


@pytest.mark.parametrize(
    ("above", "below"),
    [
        pytest.param((), (), id="shards"),
        pytest.param(TASKS, ("--set", "strategy.kind=syncps"), id="tasks", marks=pytest.mark.long),  # test_relayed_tasks.py has the rules
    ],
)
def test_a_relay_that_is_killed_goes_on_and_every_batch_counts_once_on_both_levels(
    processes: Processes, tmp_path: Path, above: tuple[str, ...], below: tuple[str, ...]
) -> None:
    """Its workers hold the run up until it is killed: all of it takes two seconds."""
    plugin = ("--plugin", str(Path(__file__).parents[1] / "support" / "watched_task.py"))
    coordinator, (_, *command, _, _) = processes.coordinate("--host", "127.0.0.1", *plugin, "--set", "task.kind=watched", *above)
    for name in ("here", "w2"):
        (tmp_path / f"{name}.wish").write_text("hold 12")
    start = ["relay", *command, *plugin, "--name", "left", "--expect", "2", "--workers", "2", "--run-dir", "left", "--host", "127.0.0.1"]
    start += below
    relay, ledger = processes.start(*start), tmp_path / "left" / "coordinator" / "ledger.jsonl"
    eventually(lambda: max([path.stat().st_size for path in tmp_path.glob("*.steps")], default=0) == 12)
    os.kill(relay.pid, signal.SIGKILL)
    relay.wait()
    (tmp_path / "go").touch()
    before = len(ledger.read_text().splitlines())
    code, output = processes.run(*start, "--resume")
    assert code == 0, output
    output, _ = coordinator.communicate(timeout=HANG_S)
    assert coordinator.returncode == 0, output
    assert len(ledger.read_text().splitlines()) > before
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["eval"]["accuracy"] > 0.8
    processes.here("audit", "run", "--relay", "left", "--receipts", "left/upstream.jsonl")
    processes.audit("left")


def test_runs_whose_strategy_has_no_rounds_refuse_relays(processes: Processes) -> None:
    coordinator, command = processes.coordinate("--host", "127.0.0.1", "--set", "strategy.kind=edp")
    code, output = processes.run("relay", *command[1:], "--name", "left", "--expect", "2")
    assert code == 2
    assert "this run cannot have relays: edp has no rounds that wait for all" in output
    coordinator.kill()
