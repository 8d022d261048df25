"""GPT-2 124M on one GPU in bf16, batch 32 × 1024: tokens/s of `SingleEngine` against a compiled Hugging Face GPT2LMHeadModel.

Both train from random weights on the same batches with fused AdamW under autocast, compiled, no dropout, interleaved in one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from run import Row
from torch import Tensor

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.models import build
from shoal.tasks.language import LanguageModelling

BATCH, LENGTH, VOCABULARY = 32, 1024, 50257
STEPS, ROUNDS = 20, 5

Step = Callable[[], Tensor]


def ours(batch: dict[str, Tensor]) -> Step:
    model = {"kind": "gpt", "hidden_size": 768, "num_layers": 12, "num_heads": 12, "max_seq_len": LENGTH}
    training = {"precision": {"kind": "bf16"}, "compile": True, "cuda_graph": True, "optimizer": {"name": "AdamW", "learning_rate": 3e-4}}
    settings = {"model": model, "training": training, "data": {"sequence_length": LENGTH}}
    run = resolve_data(settings, name="bench", dialect="shoal", environ={}).run
    engine = SingleEngine(run, LanguageModelling(build(run, DataShapes(vocab_size=VOCABULARY))), torch.device("cuda"), 10_000, learns=True)
    return lambda: engine.step([batch]).metrics["loss"]


def peer(batch: dict[str, Tensor]) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = torch.compile(GPT2LMHeadModel(config).cuda().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def tokens_per_second(step: Step) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = step()
    torch.cuda.synchronize()
    assert float(loss) == float(loss)
    return STEPS * BATCH * LENGTH / (time.perf_counter() - start)


def measure() -> list[Row]:
    torch.set_float32_matmul_precision("high")
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device="cuda")
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    steps = {"ours": ours(batch), "peer": peer(batch)}
    for step in steps.values():
        for _ in range(5):
            step()
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            rates[name].append(tokens_per_second(step))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    memory = torch.cuda.max_memory_allocated() / 2**30
    note = f"peak memory of both {memory:.1f} GiB"
    return [Row("gpu-dense GPT-2 124M", middle["ours"], middle["peer"], "tokens/s", middle["ours"] / middle["peer"], "≥ 1.35", note)]
