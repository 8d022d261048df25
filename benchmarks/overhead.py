"""Samples/s of Shoal's loop against a hand-written PyTorch loop of the same model, data and optimizer, interleaved in one run.

The peer is what a careful person writes: data as tensors in memory, one index per batch, fused optimizer, gradients set to None,
clipping as the configuration says, the loss read every ten steps. Shoal's side is the whole of `shoal train` after start-up:
feed, engine, records, metrics.jsonl.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from run import Row
from torch import nn
from torch.nn import functional as F

from shoal.config.load import ConfigFile, Override, resolve
from shoal.runs.build_run import assemble
from shoal.runs.training.train_alone import prepare

DATA = Path(__file__).parents[2] / "shared" / "data"
ROUNDS = 7

Timed = Callable[[int], float]


def settings(kind: str) -> tuple[list[ConfigFile], list[Override], int, int]:
    """Files, settings, batch size and steps of a round."""
    quiet = {"evaluation.strategy": "never", "checkpoint.strategy": "never", "training.max_steps": "100000000"}
    if kind == "mlp":
        source = {"data.source.kind": "mnist", "data.source.path": str(DATA / "mnist")} if DATA.is_dir() else {}
        values = quiet | source | {"model.hidden_sizes": "[128, 128]", "training.clipping.max_norm": "1.0", "training.epochs": "1000000"}
        return [ConfigFile("starter")], [_override(*item) for item in values.items()], 32, 2000
    return [ConfigFile("demo-gpt")], [_override(*item) for item in quiet.items()], 16, 12


def _override(path: str, value: str) -> Override:
    return Override(path, value, f"--set {path}={value}")


def shoal_side(kind: str, folder: str) -> Timed:
    files, overrides, batch_size, _ = settings(kind)
    loaded = resolve(files, overrides, environ={})
    loop = prepare(loaded, run_dir=os.path.join(folder, kind), resume=False, reporters=[])
    loop.save = lambda: None  # type: ignore[method-assign]

    def run(steps: int) -> float:
        loop.engine.total_steps = loop.step + steps
        start = time.perf_counter()
        loop._steps()
        return steps * batch_size / (time.perf_counter() - start)

    return run


def hand_side(kind: str) -> Timed:
    files, overrides, batch_size, _ = settings(kind)
    parts = assemble(resolve(files, overrides, environ={}).run)
    model = parts.engine.task.players["model"]
    plain = type(model).__new__(type(model))
    plain.__dict__ = model.__dict__
    for parameter in plain.parameters():
        parameter.data, parameter.grad = parameter.data.clone(), None
    learning_rate = 1e-3 if kind == "mlp" else 2e-3
    optimizer = torch.optim.AdamW(plain.parameters(), lr=learning_rate, fused=True)
    samples = parts.data.train
    everything = samples.batch(range(len(samples)))  # type: ignore[union-attr, arg-type]
    inputs, labels = (everything["image"], everything["label"]) if kind == "mlp" else (everything["input_ids"], everything["labels"])
    order = torch.randperm(len(inputs))
    position = 0
    seen = []

    def run(steps: int) -> float:
        nonlocal order, position
        start = time.perf_counter()
        for step in range(steps):
            if position + batch_size > len(order):
                order, position = torch.randperm(len(inputs)), 0
            index = order[position : position + batch_size]
            position += batch_size
            optimizer.zero_grad(set_to_none=True)
            logits = plain(inputs[index])
            loss = F.cross_entropy(logits.flatten(0, -2), labels[index].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            if step % 10 == 0:
                seen.append(loss.item())
        return steps * batch_size / (time.perf_counter() - start)

    return run


def measure() -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, name in (("mlp", "MLP on MNIST"), ("gpt", "small GPT")):
            steps = settings(kind)[3]
            ours, hand = shoal_side(kind, folder), hand_side(kind)
            for side in (ours, hand):
                side(max(3, steps // 10))
            rates: dict[str, list[float]] = {"ours": [], "hand": []}
            for _ in range(ROUNDS):
                rates["ours"].append(ours(steps))
                rates["hand"].append(hand(steps))
            left, right = statistics.median(rates["ours"]), statistics.median(rates["hand"])
            ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates["hand"], strict=True))
            rows.append(Row(f"overhead, {name}", left, right, "samples/s", ratio, "≥ 0.97"))
    return rows
