"""An engine: a worker that computes only a share of the time, so that the machine stays usable for other work."""

from __future__ import annotations

import time
from typing import Literal

import torch

from shoal.plugins import Batch, Engine, PositiveShare, Run, SingleEngine, StepResult, TrainingTask, World, builds


class Throttled(Engine):
    """One process, one device, with a pause after each gradient."""

    kind: Literal["throttled"] = "throttled"
    several_processes = False
    busy: PositiveShare = 0.5
    """Share of the time in which it computes."""


@builds(Throttled)
class ThrottledEngine(SingleEngine):
    def __init__(self, run: Run, task: TrainingTask, device: torch.device, total_steps: int, world: World) -> None:
        super().__init__(run, task, device, total_steps, learns=True)
        assert isinstance(run.engine, Throttled)
        self.busy = run.engine.busy

    def gradients(self, batches: list[Batch]) -> StepResult:
        began = time.monotonic()
        result = super().gradients(batches)
        time.sleep((time.monotonic() - began) * (1 / self.busy - 1))
        return result
