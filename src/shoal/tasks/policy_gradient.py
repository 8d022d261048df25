"""Policy-gradient task (PPO): a policy learns from its own answers. Tokens with a positive advantage become more probable, by a limited
ratio.

Scores and advantages are computed where the answers are made (`runs/rlhf/rollouts.py`); a batch holds the answers with the results.

Shapes: B answers, L tokens of prompt and answer, T tokens of the longest answer (the last T of L), N tokens that count, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema import task as schema
from shoal.config.schema.rlhf import Rlhf
from shoal.tasks.answer_logprobs import PromptAnswers, as_used, chosen, given_to, log_softmax, spread, with_auxiliary
from shoal.tasks.base import Batch, Loss, MetricMeans, Task
from shoal.tasks.chunked_logprobs import SlopeOf, gradient_buffer_of, in_pieces, output_of, with_slopes
from shoal.tasks.dpo import SIDES, preference_loss


def build(task: schema.PpoTask, run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> PolicyGradient:
    settings = run.rlhf or Rlhf()
    return OnlineDpo(players, settings) if settings.algorithm == "online-dpo" else PolicyGradient(players, settings)


class PolicyGradient(Task):
    """All losses are means over the tokens of answers. With a value network of its own there are two, else one sum."""

    headline = "score"
    higher_is_better = True
    counts_tokens = True
    learns_from_answers = True

    def __init__(self, players: dict[str, nn.Module], settings: Rlhf) -> None:
        self.players, self.settings, self.ppo = players, settings, settings.ppo
        self.finder: Any = None
        """Finds the passages that a worker's answers read; None: answers read no passages, or other processes answer."""
        self.moved: list[Tensor] = []
        """For each batch since the list was emptied: how far the policy has moved from the one that gave the answers, in nats summed
        over tokens, and the number of those tokens."""

    def answer_only(self, finder: Any) -> None:
        self.learns_from_answers, self.finder = False, finder

    def count(self, batch: Batch) -> int:
        return int(PromptAnswers.of(batch).counted_BL.sum())

    def losses(self, batch: Batch) -> Iterator[Loss]:
        model, text = self.players["model"], PromptAnswers.of(batch)
        given, width = given_to(model, text), batch["log_probs"].shape[1]
        real_BT = text.counted_BL[:, -width:]
        with as_used(*self.players.values()):
            loss, metrics, values_BT = self._policy(batch, text, given, real_BT)
        if values_BT is not None:
            value_loss = self.value_loss(values_BT, batch, real_BT)
            metrics["value_loss"] = value_loss
            loss = loss + self.ppo.value_weight * value_loss
        yield Loss("model", with_auxiliary(loss, metrics, [given]), metrics)
        if "value" in self.players:
            with as_used(self.players["value"]):
                value_loss = self.value_loss(self.values(text, width), batch, real_BT)
            yield Loss("value", self.ppo.value_weight * value_loss, {"value_loss": value_loss})

    def _policy(
        self, batch: Batch, text: PromptAnswers, given: dict[str, Any], real_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """The policy's loss with figures, and its values where it predicts them itself. Where the model shows its output matrix, the
        logits of all tokens are never there at once."""
        model: Any = self.players["model"]
        width = real_BT.shape[1]
        if not hasattr(model, "output_weight"):
            log_p_NV = log_softmax(model, text, self.ppo.temperature, given)
            entropy_BL = spread(-(log_p_NV.exp() * log_p_NV).sum(-1), text)
            return *self.policy_loss(chosen(log_p_NV, text)[:, -width:], entropy_BL[:, -width:], batch, real_BT), None
        hidden_BLD, labels_N = model.hidden(text.input_ids_BL, **given), text.labels_BL[text.counted_BL]
        hidden_ND, weight_VD = hidden_BLD[text.counted_BL], output_of(model, given)
        slope_of, buffer_VD = self._slope_of(batch, real_BT), gradient_buffer_of(model.output_weight)
        pieces = in_pieces(hidden_ND, weight_VD, labels_N, self.ppo.temperature, slope_of, buffer_VD)
        log_probs_BT, entropy_BT = (spread(one_N, text)[:, -width:] for one_N in (pieces.log_probs_N, pieces.entropy_N))
        loss, metrics = self.policy_loss(log_probs_BT, entropy_BT, batch, real_BT)
        values_BT = model.value_head(hidden_BLD[:, -width:]).float() if hasattr(model, "value_head") else None
        return with_slopes(loss, hidden_ND, weight_VD, pieces), metrics, values_BT

    def _slope_of(self, batch: Batch, real_BT: Tensor) -> SlopeOf:
        """The slope of the policy's loss by log-probabilities and entropies of some of the tokens that count."""
        before_N, advantages_N, count = batch["log_probs"][real_BT], batch["advantages"][real_BT], int(real_BT.sum())

        def slope_of(some: slice, log_probs_n: Tensor, _: Tensor) -> tuple[Tensor, float]:
            with torch.enable_grad():
                leaf_n = log_probs_n.detach().requires_grad_()
                plain_n, clipped_n = self._gains_lost(leaf_n - before_N[some], advantages_N[some])
                (slope_n,) = torch.autograd.grad(torch.maximum(plain_n, clipped_n).sum() / count, leaf_n)
            return slope_n, -self.ppo.entropy_weight / count

        return slope_of

    def _gains_lost(self, change: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """The loss by a change of log-probabilities: with the probability ratio unclipped, and clipped."""
        ratio = change.exp()
        return -advantages * ratio, -advantages * ratio.clamp(1 - self.ppo.clip_range, 1 + self.ppo.clip_range)

    def values(self, text: PromptAnswers, width: int) -> Tensor | None:
        """The predicted return of the rest of each answer, before each of its tokens [B, T], in float32: engines that shard may compute
        in float16, in which the variance of advantages can round to 0. None: there is no value function."""
        model: Any = self.players["model"]
        values_BT: Tensor | None = None
        if "value" in self.players:
            value = self.players["value"]
            values_BT = value(text.input_ids_BL, **given_to(value, text))[:, -width:]
        elif hasattr(model, "value_head"):
            values_BT = model.value_head(model.hidden(text.input_ids_BL, **given_to(model, text))[:, -width:])
        return None if values_BT is None else values_BT.float()

    def policy_loss(self, log_probs_BT: Tensor, entropy_BT: Tensor, batch: Batch, real_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The smaller of the two gains: with the ratio of the probabilities as it is, and clipped."""
        change_BT = log_probs_BT - batch["log_probs"]
        plain_BT, clipped_BT = self._gains_lost(change_BT, batch["advantages"])
        entropy = over(entropy_BT, real_BT)
        loss = over(torch.maximum(plain_BT, clipped_BT), real_BT)
        moved = torch.where(real_BT, change_BT.expm1() - change_BT, 0.0).sum().detach()
        self.moved.append(torch.stack([moved, real_BT.sum().to(moved.dtype)]))
        metrics = {
            "policy_loss": loss,
            "entropy": entropy,
            "clip_share": over((clipped_BT > plain_BT).float(), real_BT),
            "approximate_kl": moved / real_BT.sum().clamp(min=1),
        }
        return loss - self.ppo.entropy_weight * entropy, metrics

    def value_loss(self, values_BT: Tensor | None, batch: Batch, real_BT: Tensor) -> Tensor:
        """Half the squared error, or that of a value which moved no further than the clip range, whichever is larger."""
        assert values_BT is not None
        before_BT, returns_BT, reach = batch["values"], batch["returns"], self.ppo.value_clip_range
        near_BT = torch.minimum(torch.maximum(values_BT, before_BT - reach), before_BT + reach)
        return 0.5 * over(torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square()), real_BT)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The means over answers to held-out prompts: each batch has figures of some answers, by name."""
        mean = MetricMeans()
        for batch in batches:
            mean.add({name: values.float().mean() for name, values in batch.items()}, len(next(iter(batch.values()))))
        return mean.result()


class OnlineDpo(PolicyGradient):
    """Of two answers that the policy gave to a prompt, the better one becomes more probable than the other (Guo et al. 2024)."""

    counts_tokens = False

    def count(self, batch: Batch) -> int:
        return int(batch["decided"].sum())

    def losses(self, batch: Batch) -> Iterator[Loss]:
        model, references = self.players["model"], [batch[f"{side}reference"] for side in SIDES]
        with as_used(model):
            loss, metrics, givens = preference_loss(model, batch, references, schema.Dpo(beta=self.settings.beta), self.ppo.temperature)
        yield Loss("model", with_auxiliary(loss, metrics, givens), metrics)


def over(values_BT: Tensor, real_BT: Tensor) -> Tensor:
    """The mean over the tokens that count. What stands elsewhere has no part in it, nor in its gradient."""
    return torch.where(real_BT, values_BT, 0.0).sum() / real_BT.sum().clamp(min=1)
