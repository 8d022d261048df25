"""Log-probabilities of answers, shared by all tasks that learn from answers.

They are computed as the model will be used: without dropout, and with mixtures that route every token as in evaluation.

Shapes: B batch, L tokens, N tokens that count, D width, V vocabulary.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.tasks.base import IGNORED, Batch, Loss, Task
from shoal.tasks.chunked_logprobs import at_temperature, log_probs_of, output_of
from shoal.tasks.language import READ_BESIDE


class PromptAnswers(NamedTuple):
    """Prompts with answers, as tokens."""

    input_ids_BL: Tensor
    labels_BL: Tensor
    """The token that follows each; IGNORED in prompts and padding."""
    mask_BL: Tensor
    """False at padding, on either side."""
    beside: Mapping[str, Tensor] = {}
    """Texts that are read beside them, by the names of their columns."""

    @classmethod
    def of(cls, batch: Batch, side: str = "") -> PromptAnswers:
        ids_BL, labels_BL, mask_BL = (batch[f"{side}{name}"] for name in ("input_ids", "labels", "attention_mask"))
        return cls(ids_BL, labels_BL, mask_BL, {name: batch[f"{side}{name}"] for name in READ_BESIDE if f"{side}{name}" in batch})

    def as_batch(self) -> Batch:
        return {"input_ids": self.input_ids_BL, "labels": self.labels_BL, "attention_mask": self.mask_BL, **self.beside}

    @property
    def counted_BL(self) -> Tensor:
        """True where the next token belongs to the answer."""
        return self.labels_BL != IGNORED


def as_text(prompt_BP: Tensor, prompt_mask_BP: Tensor, answer_BT: Tensor, real_BT: Tensor) -> PromptAnswers:
    """Prompts, padded before, and answers in one row each, as a model reads them; the labels are the answers' tokens."""
    whole_BL = torch.cat([prompt_BP, answer_BT], 1)
    real_BL = torch.cat([torch.zeros_like(prompt_mask_BP), real_BT], 1)
    mask_BL = torch.cat([prompt_mask_BP, real_BT], 1)
    return PromptAnswers(whole_BL[:, :-1], whole_BL.masked_fill(~real_BL, IGNORED)[:, 1:], mask_BL[:, :-1])


def given_to(model: Any, text: PromptAnswers) -> dict[str, Any]:
    """The keyword arguments of a model besides the tokens. Padding on the right needs no mask: a causal model never looks there."""
    given: dict[str, Any] = {} if bool(text.mask_BL[:, 0].all()) else {"attention_mask": text.mask_BL}
    if hasattr(model, "new_beside"):
        given["beside"] = model.new_beside(counted_BL=text.counted_BL, **text.beside)
    return given


def log_softmax(model: Any, text: PromptAnswers, temperature: float = 1.0, given: dict[str, Any] | None = None) -> Tensor:
    """The log-probabilities of all tokens where an answer's token was chosen [N, V]: logits are made there, and nowhere else.

    `given`: the result of `given_to`, for callers that read what the model returns in it; None: it is made here.
    """
    given = given_to(model, text) if given is None else given
    if hasattr(model, "output_weight"):
        hidden_BLD = model.hidden(text.input_ids_BL, **given)
        logits_NV = F.linear(hidden_BLD[text.counted_BL], output_of(model, given))
    else:
        logits_NV = model(text.input_ids_BL, **given)[text.counted_BL]
    return at_temperature(logits_NV, temperature)


def chosen(log_p_NV: Tensor, text: PromptAnswers) -> Tensor:
    """The log-probabilities of the answers' own tokens [B, L]; 0 where nothing counts."""
    chosen_N = log_p_NV.gather(1, text.labels_BL[text.counted_BL][:, None]).squeeze(1)
    return spread(chosen_N, text)


def spread(values_N: Tensor, text: PromptAnswers) -> Tensor:
    """Values of the tokens that count at their places [B, L]; 0 elsewhere."""
    return values_N.new_zeros(text.labels_BL.shape).masked_scatter(text.counted_BL, values_N)


def log_probs(model: Any, text: PromptAnswers, temperature: float = 1.0, given: dict[str, Any] | None = None) -> Tensor:
    """The log-probability of each token of the answers [B, L]; 0 elsewhere."""
    if torch.is_grad_enabled() or not hasattr(model, "output_weight"):
        return chosen(log_softmax(model, text, temperature, given), text)
    hidden_ND = model.hidden(text.input_ids_BL, **(given_to(model, text) if given is None else given))[text.counted_BL]
    return spread(log_probs_of(hidden_ND, model.output_weight, text.labels_BL[text.counted_BL], temperature), text)


def share_won(margin_B: Tensor) -> Tensor:
    """The share of pairs in the right order; a tie is half a right one."""
    return ((margin_B > 0).float() + 0.5 * (margin_B == 0)).mean()


def at_the_end(values_BL: Tensor, text: PromptAnswers) -> Tensor:
    """Each row's value at its last real token [B]."""
    last_B = text.mask_BL.long().cumsum(1).argmax(1)
    return values_BL.gather(1, last_B[:, None]).squeeze(1)


def with_auxiliary(total: Tensor, metrics: dict[str, Tensor], givens: list[dict[str, Any]]) -> Tensor:
    """A loss with what the network itself adds to it, such as the balance of its experts: the mean over several passes."""
    for given in givens:
        for name, weight, value in given["beside"].losses if "beside" in given else []:
            share = value / len(givens)
            metrics[name] = metrics[name] + share if name in metrics else share
            total = total + weight * share
    return total


@contextmanager
def as_used(*models: nn.Module) -> Iterator[None]:
    """Dropout off and routing as in evaluation, until the end of the block."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class PreferenceTask(Task):
    """A task that learns from answers that people compared or labelled. A row, such as a pair of answers, counts as one sample."""

    @abstractmethod
    def compare(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Any]]]:
        """The loss, the metrics, and for each pass the arguments beside the tokens, which also hold what came back beside the output."""

    def count(self, batch: Batch) -> int:
        return len(next(iter(batch.values())))

    def losses(self, batch: Batch) -> Iterator[Loss]:
        with as_used(self.players["model"]):
            loss, metrics, givens = self.compare(batch)
        yield Loss("model", with_auxiliary(loss, metrics, givens), metrics)

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        return self.compare(batch)[1]


class Reference:
    """The reference model, which does not learn: a frozen copy of the initial model, or the model itself with LoRA switched off."""

    def __init__(self, model: Any) -> None:
        self._adapted = model if getattr(model, "has_adapters", False) else None
        self._copy: nn.Module | None = None
        if self._adapted is None:
            self._copy = copy.deepcopy(model).requires_grad_(False).eval()

    def beside(self, model: Any) -> Reference:
        """The same for a copy of the model: the frozen weights are shared."""
        other = copy.copy(self)
        other._adapted = model if self._adapted is not None else None
        return other

    def held(self, hold: Callable[[nn.Module], nn.Module], model: Any) -> Reference:
        """The same, with the frozen copy where and as an engine holds networks; `model` is what learns, as the engine holds it."""
        other = self.beside(model)
        if self._copy is not None:
            other._copy = hold(self._copy)
        return other

    @torch.no_grad()
    def log_probs(self, text: PromptAnswers, temperature: float = 1.0) -> Tensor:
        """As `log_probs`, on the device of the text."""
        if self._adapted is not None:
            with as_used(self._adapted), self._adapted.without_adapters():
                return log_probs(self._adapted, text, temperature)
        assert self._copy is not None
        return log_probs(self._copy, text, temperature)
