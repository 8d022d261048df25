"""What only a GPU shows: the fused loss in a real step, exact resume, precisions."""

from __future__ import annotations

import pytest
import torch

from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.models import build
from shoal.tasks.language import LanguageModelling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Shapes:
    image_shape, num_classes, vocab_size = None, None, 257


def engine(device: str, **training: object) -> SingleEngine:
    model = {"kind": "gpt", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
    run = resolve_data({"model": model, "training": training}, name="test", dialect="shoal", environ={}).run
    return SingleEngine(run, LanguageModelling(build(run, Shapes())), torch.device(device), 100)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(257, (count, 4, 33), generator=generator)
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:].contiguous()} for row in ids]


def test_a_gpu_follows_the_cpu() -> None:
    cpu, gpu = engine("cpu"), engine("cuda")
    for batch in batches(10):
        expected, found = cpu.step([batch]), gpu.step([batch])
        assert float(found.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=2e-3)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_half_precision_learns_the_same(kind: str, compiled: bool) -> None:
    exact, half = engine("cuda"), engine("cuda", precision={"kind": kind}, compile=compiled)
    for batch in batches(1) * 20:
        expected, found = exact.step([batch]), half.step([batch])
    assert float(found.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=0.05)
