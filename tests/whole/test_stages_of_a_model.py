"""One model over several machines, as a user starts it: `coordinate` on one, `join` on the others. Real processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from shoal.runs.folder.checkpoint import Checkpoints
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, Processes, processes_in, wait_for_line

CONFIG = """\
dialect: shoal
model: {kind: gpt, hidden_size: 16, num_layers: 3, num_heads: 2, max_seq_len: 16, dropout: 0.1}
data: {source: {kind: text, path: text.txt}, tokenizer: characters}
training: {max_steps: 40, batch_size: 4, device: cpu, clipping: {max_norm: 1.0}}
evaluation: {strategy: never}
checkpoint: {strategy: steps, every_steps: 8, keep_last: 9}
logging: {every_steps: 8}
engine: {kind: pipeline, micro_batches: 2}
cluster: {num_workers: 2}
transport: {kind: zmq, port: 0}
"""


def stages_of(folder: Path) -> list[int]:
    """Processes that have a stage, except the first one's."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").resolve() == folder.resolve() and b"shoal-stage-" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return sorted(found)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    found = Checkpoints(run / "checkpoints", 9).newest(print)
    assert found is not None
    return dict(found.weights)


def wait_until_saved(run: Path, step: int) -> None:
    eventually((run / "checkpoints" / f"step-{step:08d}").exists)


def killed_one(processes: Processes) -> None:
    wait_until_saved(processes.folder / "run", 8)
    os.kill(stages_of(processes.folder)[0], signal.SIGKILL)


@pytest.mark.long
def test_machines_with_a_stage_each_learn_as_one_machine_does_though_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    with processes_in(tmp_path) as processes:
        coordinator, command = processes.coordinate("--host", "127.0.0.1")
        machines = [processes.start(*command, "--name", name) for name in ("mini2", "mini3")]
        wait_for_line(coordinator, "3 stages begin")
        killed_one(processes)
        output, _ = coordinator.communicate(timeout=HANG_S)
        assert coordinator.returncode == 0, output
        assert "a machine was lost" in output
        for machine in machines:
            said, _ = machine.communicate(timeout=HANG_S)
            assert machine.returncode == 0, said
            assert "the run is over" in said
        assert not stages_of(tmp_path), "none is left behind"
        processes.here("train", "config.yaml", "--run-dir", "alone", "--workers", "1")
    one, other = weights_of(tmp_path / "run"), weights_of(tmp_path / "alone")
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-5, msg=name)


TASKS = """\
scheduler: {tasks: [{id: small, model_share: 0.3}, {id: large, model_share: 0.7}]}
cluster: {server: boss, workers: [mini2], hosts: {boss: {memory_gb: 4}, mini2: {memory_gb: 0.0001, flops: 100}}}
"""


def test_tasks_are_stages_and_the_machine_with_the_folder_has_the_one_placed_there(tmp_path: Path) -> None:
    """The first stage fits the machine that joins, and the last one only the coordinator's."""
    settings = CONFIG.replace("max_steps: 40", "max_steps: 4").replace("num_layers: 3", "num_layers: 5")
    (tmp_path / "config.yaml").write_text(settings.replace("cluster: {num_workers: 2}\n", TASKS))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    with processes_in(tmp_path) as processes:
        coordinator, command = processes.coordinate("--host", "127.0.0.1", "--set", "cluster.hosts.mini2.memory_gb=0.00031")
        machine = processes.start(*command)
        output, _ = coordinator.communicate(timeout=HANG_S)
        assert coordinator.returncode == 0, output
        assert "2 stages begin: mini2, this machine" in output
        said, _ = machine.communicate(timeout=HANG_S)
        assert "this machine is stage 1 of 2" in said
        code, told = processes.run("train", "config.yaml", "--run-dir", "alone", "--set", "cluster.hosts.mini2.memory_gb=1")
        assert code == 0, told
        assert re.search(r"stages: `small` \(layer 1, 23% .*; `large` \(layers 2 to 5, 77% .* on boss", told)
        code, refused = processes.run("train", "config.yaml", "--run-dir", "none")
        assert code == 2, refused
        assert "no machine is left for the stage" in refused
    one, other = weights_of(tmp_path / "run"), weights_of(tmp_path / "alone")
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-6, msg=name)
