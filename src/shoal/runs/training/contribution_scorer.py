"""Measures weights on held-out data for `updates.scorer`, with a copy of the model: the coordinator's own is not touched."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.coordinator.run_plan import ContributionScorer
from shoal.engines import SingleEngine
from shoal.errors import ShoalError
from shoal.runs.build_run import RunParts, evaluation_batch_size


class HeldOutScorer(ContributionScorer):
    """Measures with a copy of the run's model."""

    def __init__(self, parts: RunParts, draws: random.Random) -> None:
        """`draws`: unpredictable to workers, except in tests."""
        if parts.data.eval is None or not len(parts.data.eval):
            raise ShoalError("updates.scorer: there is no held-out data to measure contributions with: set data.validation_split")
        self.settings, self.samples, self._draws = parts.run.updates.scorer, parts.data.eval, draws
        self._size = evaluation_batch_size(parts.run)
        task = copy.deepcopy(parts.engine.task)
        self._feed = parts.feed.for_copy(task)
        cpu = parts.run.replace(training=parts.run.training.replace(device="cpu", compile=False))
        self._engine = SingleEngine(cpu, task, torch.device("cpu"), 1)

    def chooses(self) -> bool:
        return self._draws.random() < self.settings.share

    def draw(self) -> list[int]:
        count = -(-len(self.samples) // self._size)
        return sorted(self._draws.sample(range(count), min(count, self.settings.batches)))

    def loss(self, weights: Tensor, buffers: Tensor, batches: Sequence[int]) -> float:
        engine = self._engine
        engine.vector.copy_(weights)
        engine.changed()
        if buffers.numel():
            engine.load_buffers(buffers)
        starts = [number * self._size for number in batches]
        drawn = (self.samples.batch(range(start, min(start + self._size, len(self.samples)))) for start in starts)
        metrics = engine.evaluate(drawn)
        if "loss" not in metrics:
            raise ShoalError(f"updates.scorer: the task {type(engine.task).__name__} has no loss on held-out data")
        return float(metrics["loss"])
