"""Which of two answers is the better one: a score for each, and the chosen one's is to be higher (Bradley and Terry).

Shapes: B batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import task as schema
from shoal.tasks.answer_logprobs import PreferenceTask, PromptAnswers, at_the_end, given_to, share_won
from shoal.tasks.base import Batch


def build(task: schema.RewardTask, run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> RewardModelTask:
    return RewardModelTask(players)


class RewardModelTask(PreferenceTask):
    """−log σ(score of the chosen answer − score of the rejected one), each read at its last real token."""

    headline = "accuracy"
    higher_is_better = True

    def __init__(self, players: dict[str, nn.Module]) -> None:
        self.players = players

    def score(self, text: PromptAnswers, given: dict[str, Any] | None = None) -> Tensor:
        """The scores of texts [B]. `given`: as in `log_softmax`."""
        model = self.players["model"]
        return at_the_end(model(text.input_ids_BL, **(given_to(model, text) if given is None else given)), text)

    def compare(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Any]]]:
        texts = [PromptAnswers.of(batch, side) for side in ("chosen_", "rejected_")]
        givens = [given_to(self.players["model"], text) for text in texts]
        chosen_B, rejected_B = (self.score(text, given) for text, given in zip(texts, givens, strict=True))
        margin_B = chosen_B - rejected_B
        loss = -F.logsigmoid(margin_B).mean()
        metrics = {"loss": loss, "accuracy": share_won(margin_B), "margin": margin_B.mean()}
        return loss, metrics, givens
