"""Classification: cross-entropy and accuracy over classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import task as schema
from shoal.tasks.base import Batch, Loss, MetricMeans, Task


def build(task: schema.Classification, run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> Classification:
    return Classification(players)


class Classification(Task):
    """Cross-entropy over classes."""

    headline = "accuracy"
    higher_is_better = True

    def __init__(self, players: dict[str, nn.Module]) -> None:
        self.players = players

    def count(self, batch: Batch) -> int:
        return len(batch["label"])

    def losses(self, batch: Batch) -> Iterator[Loss]:
        logits = self.players["model"](batch["image"])
        loss = F.cross_entropy(logits, batch["label"])
        yield Loss("model", loss, {"loss": loss})

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        mean = MetricMeans()
        for batch in batches:
            logits = self.players["model"](batch["image"]).float()
            right = (logits.argmax(1) == batch["label"]).float().mean()
            mean.add({"loss": F.cross_entropy(logits, batch["label"]), "accuracy": right}, self.count(batch))
        return mean.result()
