"""`training.compile: auto`: a model is compiled on a CUDA GPU if the run is long enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines.compile_choice import reason_to_compile
from shoal.models import build
from shoal.tasks.language import LanguageModelling

LARGE = {"kind": "gpt", "hidden_size": 1024, "num_layers": 24, "num_heads": 16, "max_seq_len": 1024}


def chosen(model: dict[str, Any], steps: int, device: str) -> bool:
    settings = {"model": model, "data": {"sequence_length": 1024}, "training": {"batch_size": 16}}
    run = resolve_data(settings, name="test", dialect="shoal", environ={}).run
    task = LanguageModelling(build(run, DataShapes(vocab_size=257), device="meta"))
    return bool(reason_to_compile(run, task, torch.device(device), steps))


@pytest.mark.parametrize(
    ("model", "steps", "device", "compiles"),
    [
        (LARGE, 2_000, "cuda", True),
        (LARGE, 10, "cuda", False),
        (LARGE, 1_000, "cpu", False),
        (LARGE | {"hidden_size": 64, "num_layers": 2}, 10_000, "cuda", False),
        (LARGE | {"hidden_size": 64, "num_layers": 2}, 200_000, "cuda", True),
        ({"kind": "lstm"}, 1_000_000, "cuda", False),
    ],
)
def test_a_long_run_of_a_transformer_on_a_gpu_is_compiled(model: dict[str, Any], steps: int, device: str, compiles: bool) -> None:
    assert chosen(model, steps, device) is compiles
