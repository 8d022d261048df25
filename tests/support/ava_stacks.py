"""Stacks of ava's files, made small enough to learn on a CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from shoal.config.load import ConfigFile, resolve

SIZES = {
    "model.hidden_size": "16",
    "model.num_layers": "2",
    "model.num_heads": "2",
    "model.intermediate_size": "16",
    "model.vocab_size": "null",
    "model.max_seq_len": "16",
    "model.experts.count": "4",
    "model.experts.per_token": "2",
    "data.sequence_length": "16",
    "training.batch_size": "4",
    "training.gradient_accumulation_steps": "1",
    "training.global_batch_size": "null",
    "training.max_steps": "5",
}
MACHINE = {
    "data.source.kind": "text",
    "data.source.path": "texts",
    "data.tokenizer": "bytes",
    "data.loader.num_workers": "0",
    "training.device": "cpu",
}
"""What this machine has, in the place of a rack with its texts."""
ONE_PROCESS = {"engine.kind": "single"}
PACE = {
    "training.optimizer.learning_rate": "0.01",
    "training.schedule.kind": "constant",
    "training.schedule.warmup_steps": "0",
    "training.epochs": "null",
    "logging.every_steps": "1",
    "evaluation.strategy": "never",
    "checkpoint.strategy": "never",
    "training.early_stopping.patience": "null",
}
"""A run of five steps has no time for a warm-up of thousands."""


def write_texts(folder: Path) -> None:
    """Twenty short files that every stack can learn from."""
    words = ("the quick brown fox", "a lazy dog", "jumps over", "sleeps beside", "the river")
    lines = [f"{words[n % 5]} {words[n * 7 % 5]} {words[n * 3 % 5]} {n}.\n" for n in range(200)]
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number:02}.txt").write_text("".join(lines[number::20]))


def smaller(files: list[str], engine: Mapping[str, str] = ONE_PROCESS) -> list[str]:
    """Options that make a stack fit this machine. They leave alone what makes it a stack: routers, features, penalties, precision."""
    run = resolve([ConfigFile(name) for name in files], environ={}).run
    own = SIZES | MACHINE | PACE | dict(engine)
    if run.training.precision.kind == "fp8":
        own |= {"training.allow_emulation": "true"}
    if run.model.retrieval.enabled:  # type: ignore[attr-defined]
        own |= {"model.retrieval.encoder": "words", "model.retrieval.chunk_size": "4", "model.retrieval.passage_tokens": "4"}
    if run.model.episodic_memory.enabled:  # type: ignore[attr-defined]
        own |= {"model.episodic_memory.chunk_size": "4"}
    return sets(own)


def sets(settings: Mapping[str, str]) -> list[str]:
    """Settings as options of a command."""
    return [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]


def expect_learning(run: Path) -> None:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 5
    assert all(map(math.isfinite, losses))
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2])
