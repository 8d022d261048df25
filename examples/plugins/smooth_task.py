"""A task: classification whose labels are not quite sure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn
from torch.nn import functional as F

from shoal.plugins import Batch, ClassificationTask, Loss, Run, Share, Task, TaskInfo, builds


class SmoothLabels(Task):
    """Which class is it? Some of the certainty is spread over all classes."""

    kind: Literal["smooth-labels"] = "smooth-labels"
    needs = "labels"
    does = "classifies images"
    smoothing: Share = 0.1
    """Share of the certainty that is spread."""


@builds(SmoothLabels)
class SmoothClassification(ClassificationTask):
    def __init__(self, settings: SmoothLabels, run: Run, players: dict[str, nn.Module], info: TaskInfo) -> None:
        super().__init__(players)
        self.smoothing = settings.smoothing

    def losses(self, batch: Batch) -> Iterator[Loss]:
        logits = self.players["model"](batch["image"])
        loss = F.cross_entropy(logits, batch["label"], label_smoothing=self.smoothing)
        yield Loss("model", loss, {"loss": loss})
