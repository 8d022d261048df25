"""DiLoCo over collectives: each process has a copy of the networks and takes steps by itself; between rounds the weights are averaged with
an all-reduce.

To the coordinator the processes are one engine, whose weights are the mean of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config import Run
from shoal.engines.batch_weights import length
from shoal.engines.single import SingleEngine
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.tasks import Batch, StepResult, Task


class CollectivesEngine(SingleEngine):
    """Engine with its own batches, gradients and optimizer in each process: `world` is this process, `worker_world` all processes."""

    def __init__(self, run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> None:
        super().__init__(run, task, device, total_steps, learns=True)
        self._worker_world = world
        self._weight = 0
        """Samples or tokens that this process has learned from since the mean was last taken."""
        self._figures: dict[str, Tensor] = {}

    @property
    def worker_world(self) -> World:
        return self._worker_world

    def step(self, batches: list[Batch]) -> StepResult:
        """A process without a share of the last small batch takes no step; the others wait only for its figures."""
        samples = [batch for batch in batches if length(batch)]
        if samples:
            result = super().step(samples)
        elif self._figures:
            self.step_count += 1
            result = StepResult({name: torch.zeros_like(value) for name, value in self._figures.items()}, 0, 0)
        else:
            raise ShoalError(f"there are fewer samples than processes ({self.worker_world.size}): take more data, or fewer workers")
        self._figures, self._weight = result.metrics, self._weight + result.weight
        return result

    def gathered(self) -> dict[str, Any]:
        return super().gathered() | {"weight": self._weight, "figures": self._figures}

    def load_gathered(self, state: dict[str, Any]) -> None:
        super().load_gathered(state)
        self._weight = state["weight"]
        self._figures = {name: value.to(self.device) for name, value in state["figures"].items()}

    def wholes(self) -> Iterator[Tensor]:
        """Yield the mean weights of all processes, weighted by what each has learned from since the last mean. All processes must
        iterate to the end; their own weights do not change."""
        self._agree_on_statistics()
        for one in self.kept:
            one.share_movement(lambda values: self.worker_world.add_up(values) / self.worker_world.size)
        (total,) = self.worker_world.begin_sum([self._weight]).wait()
        mean = self.vector * (self._weight / total if total else 1 / self.worker_world.size)
        self._weight = 0
        dist.all_reduce(mean)
        at = 0
        for own in self._own():
            yield mean[at : at + own.numel()].view_as(own)
            at += own.numel()
