"""A copy of the networks in each process, which steps by itself: towards the others they are one engine whose weights are the mean of all.

This is DiLoCo over collectives: nothing but an all-reduce of the weights between rounds of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config import Run
from shoal.engines.single import SingleEngine
from shoal.engines.world import World
from shoal.tasks import Task


class Replicas(SingleEngine):
    """Its own batches, its own gradients, its own optimizer: `world` is this process alone, `crew` are all."""

    def __init__(self, run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> None:
        super().__init__(run, task, device, total_steps)
        self._crew = world

    @property
    def crew(self) -> World:
        return self._crew

    def wholes(self) -> Iterator[Tensor]:
        """The mean over all processes, each of which must go through all of it. Their own weights stay as they are."""
        self._agree_on_statistics()
        mean = self.vector.clone()
        dist.all_reduce(mean)
        mean /= self.crew.size
        at = 0
        for own in self._own():
            yield mean[at : at + own.numel()].view_as(own)
            at += own.numel()
