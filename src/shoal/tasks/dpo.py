"""Chosen answers become more probable than rejected ones, measured against the model of the beginning (Rafailov et al. 2023).

Shapes: B batch, L tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Run
from shoal.config.schema import task as schema
from shoal.tasks.answers import Pairwise, Reference, Text, given_to, log_probs, share_won
from shoal.tasks.base import Batch, TaskInfo

_SIDES = ("chosen_", "rejected_")


def build(task: schema.Dpo, run: Run, players: dict[str, nn.Module], info: TaskInfo) -> Dpo:
    return Dpo(players, task.beta, task.label_smoothing)


class Dpo(Pairwise):
    """−log σ(β · ((log π − log π₀) of the chosen answer − the same of the rejected one)). The reference is no player: it never learns."""

    headline = "loss"
    higher_is_better = False

    def __init__(self, players: dict[str, nn.Module], beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        self.players = players
        self.beta, self.label_smoothing = beta, label_smoothing
        self.reference = Reference(players["model"])

    def compare(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Any]]]:
        model, texts = self.players["model"], [Text.of(batch, side) for side in _SIDES]
        givens = [given_to(model, text) for text in texts]
        gains = []
        for text, given in zip(texts, givens, strict=True):
            gains.append(log_probs(model, text, given=given).sum(1) - self.reference.log_probs(text).sum(1))
        margin_B = self.beta * (gains[0] - gains[1])
        smoothing = self.label_smoothing
        loss = -((1 - smoothing) * F.logsigmoid(margin_B) + smoothing * F.logsigmoid(-margin_B)).mean()
        metrics = {
            "loss": loss,
            "accuracy": share_won(margin_B),
            "margin": margin_B.mean(),
            "chosen_reward": self.beta * gains[0].mean(),
            "rejected_reward": self.beta * gains[1].mean(),
        }
        return loss, metrics, givens
