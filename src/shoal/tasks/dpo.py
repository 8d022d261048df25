"""Preference optimization: the probabilities of whole answers, of pairs or with a label, become those that people prefer.

Losses as TRL 1.12 computes them: `sigmoid` (DPO, Rafailov et al. 2023), `ipo`, `hinge`, `robust`, `kto` (unpaired), and `orpo` and `simpo`,
which need no reference model.

Shapes: B batch, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import task as schema
from shoal.tasks.answer_logprobs import PreferenceTask, PromptAnswers, Reference, given_to, log_probs, share_won
from shoal.tasks.base import IGNORED, Batch

SIDES = ("chosen_", "rejected_")
_LEAST = 1e-7
"""An answer is never taken to be quite certain: its odds would be infinite."""
Compared = tuple[Tensor, dict[str, Tensor], list[dict[str, Any]]]


def build(task: schema.Dpo, run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> PreferenceTask:
    if task.loss in ("orpo", "simpo"):
        return (Orpo if task.loss == "orpo" else SimPo)(players, task)
    return (Kto if task.loss == "kto" else Dpo)(players, task)


class _AgainstReference(PreferenceTask):
    """A loss relative to the initial model. The reference is no player: it never learns."""

    headline = "loss"

    def __init__(self, players: dict[str, nn.Module], settings: schema.Dpo) -> None:
        self.players, self.settings = players, settings
        self.reference = Reference(players["model"])

    def place_frozen(self, hold: Callable[[nn.Module], nn.Module]) -> None:
        self.reference = self.reference.held(hold, self.players["model"])


class Dpo(_AgainstReference):
    """Pairs: by how much more the chosen answer's log-probability has risen than the rejected one's, log π − log π₀."""

    def compare(self, batch: Batch) -> Compared:
        references = [self.reference.log_probs(PromptAnswers.of(batch, side)).sum(1) for side in SIDES]
        return preference_loss(self.players["model"], batch, references, self.settings)


def preference_loss(
    model: nn.Module, batch: Batch, references: Sequence[Tensor], settings: schema.Dpo, temperature: float = 1.0
) -> Compared:
    """The loss of pairs, figures, and what was given to the model. `references`: how probable the reference finds the answers [B], chosen
    and rejected; a batch with `decided` [B] says which pairs have a better answer: the others count nothing."""
    texts = [PromptAnswers.of(batch, side) for side in SIDES]
    givens = [given_to(model, text) for text in texts]
    sums = [log_probs(model, text, temperature, given).sum(1) for text, given in zip(texts, givens, strict=True)]
    gains = [sum_B - reference_B for sum_B, reference_B in zip(sums, references, strict=True)]
    losses_B = pair_losses(Pairs(*gains, *map(_lengths, texts)), settings)
    decided_B = batch["decided"] if "decided" in batch else torch.ones_like(losses_B, dtype=torch.bool)
    loss = torch.where(decided_B, losses_B, 0.0).sum() / decided_B.sum().clamp(min=1)
    return loss, {"loss": loss, **_figures(settings.beta, gains, sums)}, givens


class Pairs(NamedTuple):
    """What a loss compares: by how much each answer's log-probability has risen [B], and the answers' numbers of tokens [B]."""

    chosen_B: Tensor
    rejected_B: Tensor
    chosen_length_B: Tensor
    rejected_length_B: Tensor


def pair_losses(pairs: Pairs, settings: schema.Dpo) -> Tensor:
    """The loss of each pair [B]."""
    beta, smoothing = settings.beta, settings.label_smoothing
    margin_B = beta * (pairs.chosen_B - pairs.rejected_B)
    if settings.loss == "ipo":  # per token, as its authors computed it
        mean_B = pairs.chosen_B / pairs.chosen_length_B - pairs.rejected_B / pairs.rejected_length_B
        return (mean_B - 1 / (2 * beta)).square()
    if settings.loss == "hinge":
        return torch.relu(1 - margin_B)
    if settings.loss == "robust":
        return _smoothed(margin_B, -smoothing, 1 - smoothing) / (1 - 2 * smoothing)
    return _smoothed(margin_B, smoothing, 1 - smoothing)


def _smoothed(margin_B: Tensor, wrong: float, right: float) -> Tensor:
    """−log σ of the margin and of its opposite, by their weights."""
    right_B = -right * F.logsigmoid(margin_B)
    return right_B - wrong * F.logsigmoid(-margin_B) if wrong else right_B


def _lengths(text: PromptAnswers) -> Tensor:
    return text.counted_BL.sum(1).clamp(min=1)


def _figures(beta: float, gains: Sequence[Tensor], log_probs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The rewards that a policy implies, β times the gains, and the log-probabilities of the answers."""
    chosen_B, rejected_B = (beta * gain_B for gain_B in gains)
    return {
        "accuracy": share_won(chosen_B - rejected_B),
        "margin": (chosen_B - rejected_B).mean(),
        "chosen_reward": chosen_B.mean(),
        "rejected_reward": rejected_B.mean(),
        "chosen_log_prob": log_probs[0].mean(),
        "rejected_log_prob": log_probs[1].mean(),
    }


class Kto(_AgainstReference):
    """Single answers, good or bad (Ethayarajh et al. 2024): a good one is to gain more than the divergence from the reference, a bad one
    less. The divergence is estimated from prompts with the answers of other prompts, `kl_`, in which no gradient is taken."""

    def compare(self, batch: Batch) -> Compared:
        model, text, beta = self.players["model"], PromptAnswers.of(batch), self.settings.beta
        given, good_B = given_to(model, text), batch["desirable"]
        sum_B = log_probs(model, text, given=given).sum(1)
        gain_B, kl = sum_B - self.reference.log_probs(text).sum(1), self._divergence(batch)
        losses_B = torch.where(
            good_B,
            self.settings.desirable_weight * (1 - torch.sigmoid(beta * (gain_B - kl))),
            self.settings.undesirable_weight * (1 - torch.sigmoid(beta * (kl - gain_B))),
        )
        loss = losses_B.mean()
        return loss, {"loss": loss, "kl": kl} | self._figures(beta * gain_B, sum_B, good_B), [given]

    @torch.no_grad()
    def _divergence(self, batch: Batch) -> Tensor:
        """The mean over the batches of all processes that step together, and at least 0."""
        text = PromptAnswers.of(batch, "kl_")
        moved_BL = log_probs(self.players["model"], text) - self.reference.log_probs(text)
        ours = torch.stack([moved_BL.sum(1).mean(), moved_BL.new_ones(())])
        total, processes = self.add_up(ours)
        return (total / processes).clamp(min=0)

    def _figures(self, reward_B: Tensor, sum_B: Tensor, good_B: Tensor) -> dict[str, Tensor]:
        """Means over the good and over the bad answers, of which a batch may have none: see `MetricMeans`."""
        figures: dict[str, Tensor] = {}
        for name, share, some_B in (("chosen", "desirable_share", good_B), ("rejected", "undesirable_share", ~good_B)):
            figures |= {share: some_B.float().mean()} | {
                f"{name}_{figure}/{share}": torch.where(some_B, value_B, 0.0).mean()
                for figure, value_B in (("reward", reward_B), ("log_prob", sum_B))
            }
        return figures


class _WithoutReference(PreferenceTask):
    """A loss of the model's own probabilities: there is no second model."""

    headline = "loss"

    def __init__(self, players: dict[str, nn.Module], settings: schema.Dpo) -> None:
        self.players, self.settings = players, settings


class SimPo(_WithoutReference):
    """Pairs, by the mean log-probability of a token, with a margin γ (Meng et al. 2024)."""

    def compare(self, batch: Batch) -> Compared:
        model, texts, settings = self.players["model"], [PromptAnswers.of(batch, side) for side in SIDES], self.settings
        givens = [given_to(model, text) for text in texts]
        means = [log_probs(model, text, given=given).sum(1) / _lengths(text) for text, given in zip(texts, givens, strict=True)]
        smoothing = settings.label_smoothing
        loss = _smoothed(settings.beta * (means[0] - means[1]) - settings.gamma, smoothing, 1 - smoothing).mean()
        return loss, {"loss": loss, **_figures(settings.beta, means, means)}, givens


class Orpo(_WithoutReference):
    """Pairs, by the odds of a token (Hong et al. 2024), beside the likelihood of the prompt and the chosen answer."""

    def compare(self, batch: Batch) -> Compared:
        model, texts, beta = self.players["model"], [PromptAnswers.of(batch, side) for side in SIDES], self.settings.beta
        givens = [given_to(model, text) for text in texts]
        whole = _with_prompts(texts[0])
        whole_BL = log_probs(model, whole, given=givens[0])
        likelihood = -whole_BL.sum() / whole.counted_BL.sum().clamp(min=1)
        chosen_B = torch.where(texts[0].counted_BL, whole_BL, 0.0).sum(1) / _lengths(texts[0])
        rejected_B = log_probs(model, texts[1], given=givens[1]).sum(1) / _lengths(texts[1])
        log_odds_B = _log_odds(chosen_B) - _log_odds(rejected_B)
        ratio = F.logsigmoid(log_odds_B).mean()
        loss = likelihood - beta * ratio
        more = {"nll_loss": likelihood, "log_odds_ratio": ratio, "log_odds_chosen": log_odds_B.mean()}
        return loss, {"loss": loss, **more, **_figures(beta, [chosen_B, rejected_B], [chosen_B, rejected_B])}, givens


def _with_prompts(text: PromptAnswers) -> PromptAnswers:
    """The same text, of which the prompt is learned, too."""
    following_BL = torch.roll(text.input_ids_BL, -1, 1).masked_fill(~torch.roll(text.mask_BL, -1, 1) | ~text.mask_BL, IGNORED)
    following_BL[:, -1] = IGNORED
    return text._replace(labels_BL=torch.where(text.counted_BL, text.labels_BL, following_BL))


def _log_odds(log_p_B: Tensor) -> Tensor:
    """log(p / (1 − p))."""
    log_p_B = log_p_B.clamp(max=-_LEAST)
    return log_p_B - torch.log(-torch.expm1(log_p_B))
