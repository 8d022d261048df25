"""Tasks: losses, metrics, evaluation and samples."""

from __future__ import annotations

from torch import nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema.task import TEXT
from shoal.errors import ShoalError
from shoal.tasks.base import Batch, Loss, MetricMeans, StepResult, Task

__all__ = ["Batch", "Loss", "MetricMeans", "StepResult", "Task", "build"]


def build(run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> Task:
    """The task of a run, with the networks that it trains."""
    settings = run.chosen_task
    _expect(settings.needs, settings.kind, shapes)
    return settings.builder()(settings, run, players, shapes)


def _expect(needs: str, kind: str, shapes: DataShapes) -> None:
    """Check that the data suits the task. Raises ShoalError."""
    if needs == "labels" and shapes.num_classes is None:
        raise ShoalError(f"{kind} needs data with labels: put the images of each class in a folder of its own")
    if needs == "images" and shapes.image_shape is None:
        raise ShoalError(f"{kind} learns from images, and the data (data.source) has none")
    if needs in TEXT and shapes.vocab_size is None:
        raise ShoalError(f"{kind} learns from text, and the data (data.source) has none")
