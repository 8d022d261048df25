"""Parameters and optimizer state on a disk: slow, and DeepSpeed compiles what it needs for it when it is first asked to, for minutes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.processes import Processes, processes_in, wait_for_line

GPUS = torch.cuda.device_count()
CONFIG = f"""\
dialect: shoal
model: {{kind: gpt, hidden_size: 512, num_layers: 4, num_heads: 8, max_seq_len: 16, dropout: 0.0}}
data: {{source: {{kind: text, path: text.txt}}, tokenizer: characters}}
training: {{max_steps: 6, batch_size: 4, optimizer: {{learning_rate: 0.00005}}, schedule: {{kind: constant}}}}
evaluation: {{strategy: never}}
checkpoint: {{strategy: steps, every_steps: 3}}
logging: {{every_steps: 1}}
launch: {{devices_per_node: {GPUS or 2}}}
"""
DISK = ["engine.kind=deepspeed", "engine.zero_stage=3", "engine.nvme_offload=true", "engine.nvme_path=disk"]


def can_reach_a_disk() -> bool:
    """As DeepSpeed finds out."""
    if find_spec("deepspeed") is None or shutil.which("c++") is None:
        return False
    builder = __import__("deepspeed").accelerator.get_accelerator().create_op_builder("AsyncIOBuilder")
    return bool(builder.is_compatible(verbose=False))


pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_reach_a_disk(), reason="needs DeepSpeed, libaio's headers and a compiler (apt install libaio-dev)"),
]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "disk").mkdir()
    with processes_in(tmp_path) as made:
        yield made


def command(run: str, *settings: str) -> list[str]:
    return ["train", "config.yaml", "--run-dir", run, *(word for setting in settings for word in ("--set", setting))]


def losses_of(processes: Processes, run: str, *settings: str) -> list[float]:
    process = processes.start(*command(run, *settings))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return [json.loads(line)["loss"] for line in (processes.folder / run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_disk_is_a_run_in_memory_and_resumes(processes: Processes) -> None:
    alone = ["engine.kind=single", "launch.devices_per_node=null", f"training.batch_size={4 * (GPUS or 2)}"]
    whole = losses_of(processes, "whole", *alone)
    part = losses_of(processes, "part", *DISK, "training.max_steps=3")
    rest = losses_of(processes, "rest", *DISK, "checkpoint.resume_from=part")
    in_memory = losses_of(processes, "memory", *alone, "checkpoint.resume_from=part")
    assert part == pytest.approx(whole[:3], rel=1e-3)
    assert rest == pytest.approx(whole[3:], rel=1e-3)
    assert rest == pytest.approx(in_memory, rel=1e-5)
    assert not list((processes.folder / "disk").iterdir()), "nothing stays behind"


def test_what_a_killed_run_left_on_the_disk_goes_with_the_next(processes: Processes) -> None:
    run = processes.start(*command("killed", *DISK, "training.max_steps=100000"))
    wait_for_line(run, r"step \d+")
    left = list((processes.folder / "disk").glob("shoal-*"))
    assert left
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").resolve() == processes.folder.resolve():
                os.kill(int(path.name), signal.SIGKILL)
        except OSError:
            continue
    run.wait(30)
    assert all(path.exists() for path in left)
    losses_of(processes, "next", *DISK, "training.max_steps=2")
    assert not list((processes.folder / "disk").iterdir())
