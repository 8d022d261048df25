"""A run on a Ray cluster of two nodes, of which one is taken away and another comes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.main import main
from tests.support.eventually import eventually

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


def workers_since(ledger: Path, version: int) -> set[str]:
    """Who contributed after a version."""
    lines = ledger.read_text().splitlines()[version:] if ledger.exists() else []
    return {contribution[0] for line in lines if line.endswith("}") for contribution in json.loads(line)["from"]}


def wait_for_both(ledger: Path) -> None:
    """Wait until both workers have contributed to versions that do not exist yet."""
    version = len(ledger.read_text().splitlines()) if ledger.exists() else 0
    eventually(lambda: workers_since(ledger, version) == {"ann", "bo"})


def test_a_node_that_goes_is_missed_by_nobody_and_one_that_comes_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    run = tmp_path / "run"
    log, ledger = run / "up.log", run / "coordinator" / "ledger.jsonl"
    cluster = ray_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        try:
            address = ["--set", f"launch.ray.address={cluster.address}"]
            assert main(["up", "fleet.yaml", *address, "--run-dir", "run", "--host", "127.0.0.1"]) == 0
            wait_for_both(ledger)
            cluster.remove_node(node)
            eventually(lambda: "starting it again" in log.read_text())
            cluster.add_node(num_cpus=1)
            wait_for_both(ledger)
        finally:
            print(log.read_text()[-3000:] if log.exists() else "nothing was said")
            assert main(["down", "run"]) == 0
    finally:
        cluster.shutdown()
    assert len(list((run / "workers").glob("*.jsonl"))) == 2, "the receipts came back"
    assert main(["audit", "run"]) == 0
