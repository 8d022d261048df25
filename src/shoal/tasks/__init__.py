"""What is learned: losses, metrics, evaluation, samples."""

from __future__ import annotations

from torch import nn

from shoal.config import Run
from shoal.errors import ShoalError
from shoal.tasks.base import Batch, Loss, Task, TaskInfo
from shoal.tasks.classification import Classification
from shoal.tasks.gan import Gan
from shoal.tasks.language import LanguageModelling

__all__ = ["Batch", "Loss", "Task", "TaskInfo", "build"]


def build(run: Run, players: dict[str, nn.Module], info: TaskInfo, eos_id: int | None = None) -> Task:
    """The task of a run, over the networks it is learned by."""
    if run.task == "classification":
        if info.num_classes is None:
            raise ShoalError("classification needs data with labels: put the images of each class in a folder of its own")
        return Classification(players)
    if run.task == "language-modelling":
        if info.vocab_size is None:
            raise ShoalError("a language model learns from text, and data.source holds images")
        return LanguageModelling(players, run.training.penalties, eos_id, left_padding=run.data.padding_side == "left")
    if run.task == "gan":
        if info.image_shape is None:
            raise ShoalError("a GAN learns from images, and data.source holds text")
        assert run.model.kind == "dcgan"
        return Gan(players, run.model.latent_dim, run.seed)
    raise ShoalError(f"the task {run.task} is not built yet")
