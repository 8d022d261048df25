"""Inside a worker: how batches become an update on its own devices."""

from __future__ import annotations

import torch

from shoal.config import Run
from shoal.engines.base import Engine
from shoal.engines.single import SingleEngine, choose_device
from shoal.engines.world import Rendezvous, World, enter
from shoal.tasks import StepResult, Task

__all__ = ["Engine", "Rendezvous", "SingleEngine", "StepResult", "World", "build", "choose_device", "enter"]


def build(run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> Engine:
    """The engine that `run.engine` asks for. Its module is imported here, so a run imports no other engine's libraries."""
    return run.engine.builder()(run, task, device, total_steps, world)
