"""From the settings of a run to its engine. A new kind of engine is one file and one line here."""

from __future__ import annotations

from importlib import import_module

import torch

from shoal.config import Run
from shoal.engines.base import Engine
from shoal.engines.replicas import Replicas
from shoal.engines.single import SingleEngine
from shoal.engines.world import World
from shoal.tasks import Task

OF_SEVERAL = {"ddp": "DdpEngine", "fsdp": "FsdpEngine", "deepspeed": "DeepSpeedEngine"}
"""Engines of several processes: the module, and the class in it."""


def build(run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> Engine:
    """The engine that `run.engine` asks for. Where the transport is `collectives`, one engine stands for all workers."""
    if run.transport.kind == "collectives":
        return Replicas(run, task, device, total_steps, world)
    if run.engine.kind not in OF_SEVERAL:
        return SingleEngine(run, task, device, total_steps)
    module = import_module(f"shoal.engines.{run.engine.kind}")
    engine: Engine = getattr(module, OF_SEVERAL[run.engine.kind])(run, task, device, total_steps, world)
    return engine
