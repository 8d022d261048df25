"""A run on a Ray cluster of two nodes, of which one is taken away and another comes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from commands import HANG_S
from shoal.cli.main import main

ray_utils = pytest.importorskip("ray.cluster_utils", reason="needs shoal[ray]")
FLEET = """\
dialect: shoal
model: {kind: mlp, hidden_sizes: [8]}
data: {source: {kind: builtin, name: digits}}
training: {epochs: 100000}
strategy: {kind: syncps, round_timeout_s: 5}
transport: {kind: zmq, port: 0}
coordinator: {heartbeat_interval_s: 0.5}
cluster: {workers: [ann, bo]}
launch: {kind: ray}
"""


def versions(ledger: Path) -> int:
    return len(ledger.read_text().splitlines()) if ledger.exists() else 0


def test_a_node_that_goes_is_missed_by_nobody_and_one_that_comes_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    cluster = ray_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    ledger, problems = tmp_path / "run" / "coordinator" / "ledger.jsonl", list[str]()

    def wait_for(least: int) -> None:
        until = time.monotonic() + HANG_S / 4
        while versions(ledger) < least and time.monotonic() < until:
            time.sleep(0.2)
        if versions(ledger) < least:
            problems.append(f"{versions(ledger)} versions, and {least} were waited for")

    def events() -> None:
        from shoal.launch.keeping_up import take_down

        wait_for(20)
        cluster.remove_node(node)
        wait_for(versions(ledger) + 20)
        cluster.add_node(num_cpus=1)
        wait_for(versions(ledger) + 40)
        take_down(tmp_path / "run", 60.0)

    beside = threading.Thread(target=events)
    beside.start()
    try:
        address = ["--set", f"launch.ray.address={cluster.address}"]
        assert main(["up", "fleet.yaml", *address, "--foreground", "--run-dir", "run", "--host", "127.0.0.1"]) == 130
    finally:
        beside.join()
        cluster.shutdown()
    assert not problems
    assert "starting it again" in capsys.readouterr().err
    assert main(["audit", "run"]) == 0
