"""DiLoCo on a mixture whose workers read different texts: experts weighed by the tokens that they saw, against the plain mean.

Two of four workers read Shakespeare, two read Python; all of them take turns in this process. The loss is the mean over both held-out texts
and over the seeds. In some rows one worker lies: it claims all its tokens for two experts of each layer, and
sends its movement turned round.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from run import Row
from torch import Tensor

from shoal.config.load import resolve_data
from shoal.config.schema.strategy import OuterOptimizer
from shoal.engines.expert_layout import expert_blocks
from shoal.engines.learners.apply import OuterStep
from shoal.runs.build_run import RunParts, assemble, feed_for_seat, held_out_batches
from shoal.updates.experts import mean_by_experts
from shoal.updates.rules import aggregation

TEXT = Path(__file__).parents[2] / "shared" / "data" / "text" / "tinyshakespeare.txt"
ROUNDS, INNER, SEEDS = 12, 25, (1, 2, 3)
SOURCES = ({"kind": "text", "path": str(TEXT)}, {"kind": "builtin", "name": "python-source"})
SEATS, EXPERTS = 2, 8
OUTER = OuterOptimizer(learning_rate=0.7, momentum=0.6)


def parts_of(source: dict[str, str], seed: int) -> RunParts:
    settings: dict[str, Any] = {
        "seed": seed,
        "model": {"kind": "moe", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": 32, "intermediate_size": 48},
        "data": {"source": source, "tokenizer": "bytes", "max_samples": 4000},
        "training": {"batch_size": 8, "max_steps": ROUNDS * INNER, "device": "cpu", "optimizer": {"name": "AdamW", "learning_rate": 0.004}},
        "evaluation": {"batches": 20},
        "strategy": {"kind": "diloco", "inner_steps": INNER, "expert_weight_cap": 1.0},
    }
    loaded = resolve_data(settings, name="bench", dialect="shoal", environ={})
    assert loaded.ok, loaded.problems
    return assemble(loaded.run)


def trained(cap: float | None, seed: int, lies: bool = False) -> float:
    """The mean of the held-out losses after all rounds."""
    workers = [parts_of(source, seed) for source in SOURCES for _ in range(SEATS)]
    feeds = [feed_for_seat(one.run, one.data, number % SEATS, SEATS) for number, one in enumerate(workers)]
    shared = parts_of(SOURCES[0], seed).single
    learner = OuterStep(OUTER).learner(shared, ())
    for number in range(ROUNDS):
        vectors, reports = list[Tensor](), list[Tensor]()
        for worker, feed in zip(workers, feeds, strict=True):
            engine = worker.single
            engine.vector.copy_(shared.vector)
            for _ in range(INNER):
                engine.step([next(feed)])
            vectors.append(shared.vector - engine.vector)
            reports.append(engine.take_report())
        if lies:
            vectors[0], reports[0] = -vectors[0], all_for_two(reports[0])
        learner.apply(combined(shared, cap, vectors, reports), torch.empty(0), number, 1.0)
    return sum(judged(worker, shared.vector) for worker in workers[::SEATS]) / len(SOURCES)


def combined(shared: Any, cap: float | None, vectors: list[Tensor], reports: list[Tensor]) -> Tensor:
    weights, room, blocks = torch.ones(len(vectors)), torch.empty_like(vectors[0]), expert_blocks(shared, cap)
    if blocks is None or cap is None:
        return aggregation.mean_of_vectors(vectors, weights, room)
    return mean_by_experts(blocks, vectors, weights, torch.stack([blocks.loads_of(one) for one in reports]), room)


def all_for_two(report: Tensor) -> Tensor:
    """As much as a worker can claim for the first two experts of each layer."""
    claimed = torch.zeros_like(report)
    claimed.view(-1, EXPERTS)[:, :2] = 0.5
    return claimed


def judged(worker: RunParts, vector: Tensor) -> float:
    worker.single.vector.copy_(vector)
    batches = held_out_batches(worker.run, worker.data.eval)
    assert batches is not None
    return worker.single.evaluate(batches())["loss"]


def measure(part: str = "") -> Iterator[Row]:
    """`part`: honest, or liar; empty: both."""
    if not TEXT.exists():
        print("moe-workers: skipped, there is no text in ../shared/data")
        return
    for lies in {"honest": [False], "liar": [True], "": [False, True]}[part]:
        plain = [trained(None, seed, lies) for seed in SEEDS]
        for cap in (1.5, 4.0):
            ours = [trained(cap, seed, lies) for seed in SEEDS]
            name = f"moe over workers, expert_weight_cap {cap:g}{', a liar among four' if lies else ''}: validation loss"
            each = ", ".join(f"{own / other:.4f}" for own, other in zip(ours, plain, strict=True))
            yield Row(name, mean(ours), mean(plain), "nats/byte", mean(ours) / mean(plain), "–", f"against the plain mean; seeds {each}")
