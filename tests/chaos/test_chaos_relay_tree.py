"""A tree of real processes: 64 workers through 8 relays, of which some are killed, and one audit of all of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.processes import HANG_S, Processes, processes_in

RELAYS, WORKERS = 8, 8
CONFIG = """\
dialect: shoal
model: {kind: mlp, hidden_sizes: [64]}
training: {batch_size: 2, epochs: 12, optimizer: {name: SGD, learning_rate: 0.1}}
strategy: {kind: syncps, round_timeout_s: 600}
transport: {port: 0}
coordinator: {heartbeat_interval_s: 5.0, devices_per_worker: 8}
evaluation: {strategy: never}
cluster: {num_workers: 8}
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with processes_in(tmp_path) as made:
        yield made


def test_64_workers_train_through_8_relays_and_one_audit_covers_all(processes: Processes, tmp_path: Path) -> None:
    coordinator, (_, *command) = processes.coordinate("--host", "127.0.0.1", "--set", f"cluster.num_workers={RELAYS}")

    def relay(name: str, *more: str) -> list[str]:
        start = ["relay", *command, "--name", name, "--expect", str(WORKERS), "--workers", str(WORKERS), "--run-dir", name]
        return [*start, "--host", "127.0.0.1", *more]

    names = [f"relay-{number}" for number in range(RELAYS)]
    relays = {name: processes.start(*relay(name)) for name in names}
    ledger = tmp_path / "run" / "coordinator" / "ledger.jsonl"
    eventually(lambda: ledger.exists() and len(ledger.read_text().splitlines()) >= 2)
    for name in names[:2]:
        os.kill(relays[name].pid, signal.SIGKILL)
        relays[name].wait()
        relays[name] = processes.start(*relay(name, "--resume"))
    output, _ = coordinator.communicate(timeout=HANG_S)
    assert coordinator.returncode == 0, output
    for name, process in relays.items():
        output, _ = process.communicate(timeout=HANG_S)
        assert process.wait() == 0, (name, output)
    members = {entry[0] for line in ledger.read_text().splitlines() for entry in json.loads(line).get("from", [])}
    assert members == set(names)
    processes.here("audit", "run", *(part for name in names for part in ("--relay", name)))
