"""A job as Slurm itself runs it: two nodes, a coordinator on the first, a worker on each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import main
from tests.support.processes import HANG_S
from tests.support.small_slurm import tiny_slurm

FLEET = """\
dialect: shoal
name: small
model: {kind: mlp, hidden_sizes: [8]}
data: {source: {kind: builtin, name: digits}}
training: {epochs: 5}
strategy: {kind: syncps, round_timeout_s: 5}
transport: {kind: zmq, port: 0}
"""


def test_a_job_of_two_nodes_is_done_and_its_audit_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    with tiny_slurm(tmp_path / "slurm") as environ:
        here = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={Path(__file__).resolve().parents[2] / 'src'}"
        options = ["--set", "launch.kind=slurm", "--set", f'launch.slurm.setup=["{here}"]', "--num_nodes", "2"]
        assert main(["up", "fleet.yaml", *options, "--run-dir", "job"]) == 0
        done = subprocess.run(
            ["sbatch", "--wait", "job/job.sbatch"], env=environ, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        logs = "".join(log.read_text() for log in (tmp_path / "job").glob("slurm-*.log"))
        assert done.returncode == 0, logs
    assert "worker-2 joined" in logs
    assert main(["audit", "job/run"]) == 0
