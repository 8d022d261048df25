"""Keeps the weights of a run's best evaluation in its folder `best/`, in the form of a checkpoint without state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from shoal.config import Run
from shoal.engines import World
from shoal.errors import ShoalError
from shoal.runs.folder.checkpoint import Checkpoints, find_checkpoint
from shoal.tasks import Task
from shoal.updates.state_packing import Checkpoint

FOLDER = "best"


def metric_of(run: Run, task: Task) -> tuple[str, bool]:
    """The metric that evaluations are compared by, and whether a higher one is better: that of `checkpoint.best`, else the task's own."""
    if run.checkpoint.best is None:
        return task.headline, task.higher_is_better
    name, higher = run.checkpoint.best_metric
    if higher is None:  # a name that the settings' check does not know
        higher = task.higher_is_better
    return name, higher


class BestWeights:
    """Holds: `value` is the metric of the weights in the folder; in every process the same."""

    def __init__(self, run: Run, task: Task, folder: Path, world: World, evaluated: bool) -> None:
        """`evaluated`: whether the run has evaluations. Raises ShoalError where the metric can never be known."""
        self.asked = run.checkpoint.best is not None
        self.enabled = evaluated and (self.asked or run.training.early_stopping.patience is not None)
        """An early stop ends with the best weights, too."""
        self.metric, self.higher = metric_of(run, task)
        self.world = world
        self.checkpoints = Checkpoints(folder / FOLDER, 1)
        self.value, self.step = math.nan, -1
        if self.asked and not evaluated:
            raise ShoalError(f"checkpoint.best: {self.metric} is a metric of evaluations, and this run has none: give it held-out data")

    def open(self) -> None:
        """Take up what the run kept before it was resumed."""
        found = newest_best(self.checkpoints.folder.parent, lambda text: None) if self.enabled and self.world.first else None
        state = found.state if found is not None and found.state["metric"] == self.metric else {"value": math.nan}
        self.value, step = self.world.broadcast_numbers([state["value"], -1 if math.isnan(state["value"]) or found is None else found.step])
        self.step = int(step)

    def is_improved_by(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is the best so far. Raises ShoalError where it lacks the metric that the settings name."""
        if self.asked and self.metric not in metrics:
            known = ", ".join(metrics)
            raise ShoalError(f"checkpoint.best: the evaluation has no `{self.metric}`; it has {known}: name one of these")
        value = metrics.get(self.metric, math.nan)
        if not self.enabled or math.isnan(value):
            return False
        return not self.kept or (value > self.value if self.higher else value < self.value)

    def keep(self, metrics: Mapping[str, float], step: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights of a step, in place of those before. All processes must call this. Raises ShoalError."""
        self.checkpoints.save(step, weights, {"metric": self.metric, "value": metrics[self.metric]}, self.world)
        self.value, self.step = metrics[self.metric], step

    @property
    def kept(self) -> bool:
        """Whether there are best weights."""
        return self.step >= 0

    @property
    def summary(self) -> dict[str, object]:
        return {"best": {"metric": self.metric, "value": self.value, "step": self.step}} if self.kept else {}

    def describe(self, step_name: str) -> str:
        return f"the best weights are those of {step_name} {self.step} ({self.metric} {self.value:.6g})"


def newest_best(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The best weights in a run's folder; None where it keeps none."""
    return Checkpoints(folder / FOLDER, 1).newest(warn)


def find_weights(path: str, warn: Callable[[str], None]) -> Checkpoint:
    """The weights of a run to use: its best, else the newest; or those of the checkpoint at a path. Raises ShoalError."""
    return newest_best(Path(path), warn) or find_checkpoint(path, warn)
