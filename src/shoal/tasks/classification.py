"""Classification: cross-entropy and accuracy over classes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import task as schema
from shoal.tasks.base import Batch, Loss, Task


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

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        logits = self.players["model"](batch["image"]).float()
        right = (logits.argmax(1) == batch["label"]).float().mean()
        return {"loss": F.cross_entropy(logits, batch["label"]), "accuracy": right}
