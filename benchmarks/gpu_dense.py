"""GPT-2 124M on one GPU in bf16, batch 32 × 1024: tokens/s of `SingleEngine` against a compiled Hugging Face GPT2LMHeadModel.

Both train from random weights on the same batches with fused AdamW under autocast, compiled, no dropout, interleaved in one run.
"""

from __future__ import annotations

import torch
from gpu_step_time import Step, median_seconds
from run import Row
from torch import Tensor

from shoal.config.data_shapes import DataShapes
from shoal.config.load import resolve_data
from shoal.engines import SingleEngine
from shoal.models import build
from shoal.tasks.language import LanguageModelling

BATCH, LENGTH, VOCABULARY = 32, 1024, 50257
STEPS, ROUNDS = 20, 5


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


def measure() -> list[Row]:
    torch.set_float32_matmul_precision("high")
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device="cuda")
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    steps = {"ours": ours(batch), "peer": peer(batch)}
    for step in steps.values():
        for _ in range(5):
            step()
    rates = {name: BATCH * LENGTH / seconds for name, seconds in median_seconds(steps, STEPS, ROUNDS).items()}
    memory = torch.cuda.max_memory_allocated() / 2**30
    note = f"peak memory of both {memory:.1f} GiB"
    return [Row("gpu-dense GPT-2 124M", rates["ours"], rates["peer"], "tokens/s", rates["ours"] / rates["peer"], "≥ 1.35", note)]
