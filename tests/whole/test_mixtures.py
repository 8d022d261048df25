"""Mixtures of experts from the command line: their biases survive an end without warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.cli.main import main
from shoal.engines import SingleEngine

SMALL = json.dumps(
    {
        "dialect": "shoal",
        "model": {
            "kind": "moe",
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 16,
            "max_seq_len": 16,
            "experts": {"count": 4, "router": "sigmoid-bias", "bias_step": 0.01},
        },
        "data": {"source": {"kind": "text", "path": "text.txt"}, "tokenizer": "characters"},
        "training": {"max_steps": 8, "batch_size": 4, "device": "cpu"},
        "checkpoint": {"every_steps": 3},
        "logging": {"every_steps": 1},
    }
)


class Killed(BaseException):
    """Nobody catches it, as nobody catches the end of a process."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return tmp_path


def records(run: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name not in ("wall_s", "memory_bytes") and "per_s" not in name and "seconds" not in name
        }
        for line in lines
    ]


def test_biases_survive_an_end_without_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["train", "small.yaml", "--run-dir", "whole"]) == 0
    real = SingleEngine.step

    def dies(self: SingleEngine, batches: Any) -> Any:
        if self.step_count == 5:
            raise Killed  # a checkpoint is written at step 3; what was after it is lost
        return real(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(SingleEngine, "step", dies)
        with pytest.raises(Killed):
            main(["train", "small.yaml", "--run-dir", "cut"])
    assert main(["train", "--run-dir", "cut", "--resume"]) == 0
    assert records("cut") == records("whole")
    ends = [load_file(next(Path(run, "checkpoints").glob("step-*8")) / "weights.safetensors") for run in ("whole", "cut")]
    assert ends[0]["model.blocks.0.feed_forward.router.bias_E"].any()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
