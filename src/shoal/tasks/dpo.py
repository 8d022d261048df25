"""DPO: chosen answers become more probable than rejected ones, relative to a frozen reference model (Rafailov et al. 2023).

Shapes: B batch, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import task as schema
from shoal.tasks.answer_logprobs import PairwiseTask, PromptAnswers, Reference, given_to, log_probs, share_won
from shoal.tasks.base import Batch

SIDES = ("chosen_", "rejected_")


def build(task: schema.Dpo, run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> Dpo:
    return Dpo(players, task.beta, task.label_smoothing)


class Dpo(PairwiseTask):
    """−log σ(β · ((log π − log π₀) of the chosen answer − the same of the rejected one)). The reference is no player: it never learns."""

    headline = "loss"

    def __init__(self, players: dict[str, nn.Module], beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        self.players = players
        self.beta, self.label_smoothing = beta, label_smoothing
        self.reference = Reference(players["model"])

    def place_frozen(self, hold: Callable[[nn.Module], nn.Module]) -> None:
        self.reference = self.reference.held(hold, self.players["model"])

    def compare(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Any]]]:
        references = [self.reference.log_probs(PromptAnswers.of(batch, side)).sum(1) for side in SIDES]
        return preference_loss(self.players["model"], batch, references, self.beta, self.label_smoothing)


def preference_loss(
    model: nn.Module, batch: Batch, references: Sequence[Tensor], beta: float, smoothing: float = 0.0, temperature: float = 1.0
) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Any]]]:
    """The loss of pairs, figures, and what was given to the model. `references`: how probable the reference finds the answers [B], chosen
    and rejected; a batch with `decided` [B] says which pairs have a better answer: the others count nothing."""
    texts = [PromptAnswers.of(batch, side) for side in SIDES]
    givens, gains = [given_to(model, text) for text in texts], []
    for text, given, reference_B in zip(texts, givens, references, strict=True):
        gains.append(log_probs(model, text, temperature, given).sum(1) - reference_B)
    margin_B = beta * (gains[0] - gains[1])
    losses_B = -((1 - smoothing) * F.logsigmoid(margin_B) + smoothing * F.logsigmoid(-margin_B))
    decided_B = batch["decided"] if "decided" in batch else torch.ones_like(margin_B, dtype=torch.bool)
    loss = torch.where(decided_B, losses_B, 0.0).sum() / decided_B.sum().clamp(min=1)
    metrics = {
        "loss": loss,
        "accuracy": share_won(margin_B),
        "margin": margin_B.mean(),
        "chosen_reward": beta * gains[0].mean(),
        "rejected_reward": beta * gains[1].mean(),
    }
    return loss, metrics, givens
