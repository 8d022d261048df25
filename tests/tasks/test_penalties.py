"""What a language model is punished for, against plain loops and float64 differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from shoal.config import load
from shoal.config.schema.training import Penalties
from shoal.engines import SingleEngine
from shoal.tasks import penalties
from shoal.tasks.base import IGNORED
from shoal.tasks.language import LanguageModelling

ALL = Penalties(repetition_weight=0.5, immediate_repetition_weight=1.0, eos_weight=5.0, min_sequence_length=3, repetition_window=4)
EOS, SIZE = 6, 7


class Table(nn.Module):
    """Logits by the token alone."""

    vocab_size = SIZE

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits[input_ids]


def marked(ids: Tensor, labels: Tensor, real: Tensor | None = None) -> penalties.Marks:
    early = torch.zeros_like(ids, dtype=torch.bool)
    return penalties.marks(ids, labels, labels != IGNORED, real, early)


def by_hand(p: Tensor, ids: Tensor, labels: Tensor) -> dict[str, float]:
    """Sums over the tokens that count, token by token; documents begin at the start and behind an end of text."""
    sums = {"repetition": 0.0, "immediate_repetition": 0.0, "early_end": 0.0}
    for b, place in ((b, t) for b in range(len(ids)) for t in range(ids.shape[1]) if labels[b, t] != IGNORED):
        right, before = int(labels[b, place]), ids[b, : place + 1].tolist()
        seen = set(before[-ALL.repetition_window :]) - {right}
        sums["repetition"] += sum(-math.log(1 - float(p[b, place, token])) for token in seen)
        sums["immediate_repetition"] += float(p[b, place, before[-1]]) if before[-1] != right else 0.0
        length = (before[:-1][::-1].index(EOS)) if EOS in before[:-1] else place
        sums["early_end"] += float(p[b, place, EOS]) if length < ALL.min_sequence_length and right != EOS else 0.0
    return sums


def test_penalties_are_sums_over_wrong_tokens_divided_by_all_that_count() -> None:
    torch.manual_seed(1)
    ids = torch.randint(SIZE, (5, 12))
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORED
    task = LanguageModelling({"model": Table()}, ALL, eos_id=EOS)
    (loss,) = task.losses({"input_ids": ids, "labels": labels})
    expected = by_hand(task.players["model"](ids).detach().softmax(-1), ids, labels)
    for name, value in expected.items():
        assert loss.metrics[name].item() == pytest.approx(value / (5 * 11), rel=1e-5), name
    weighted = sum(weight * loss.metrics[name] for name, weight in zip(penalties.NAMES, penalties.weights(ALL), strict=True))
    assert loss.value.item() == pytest.approx(float((loss.metrics["loss"] + weighted).detach()), rel=1e-6)


def test_the_right_token_is_never_punished() -> None:
    ids = torch.full((1, 6), 2)
    task = LanguageModelling({"model": Table()}, ALL, eos_id=2)
    (loss,) = task.losses({"input_ids": ids, "labels": ids})
    assert all(loss.metrics[name] == 0 for name in penalties.NAMES)


def test_padding_is_no_repetition() -> None:
    ids, real = torch.tensor([[5, 5, 1, 2]]), torch.tensor([[False, False, True, True]])
    labels = torch.tensor([[IGNORED, IGNORED, 2, 3]])
    log_p = torch.randn(1, 4, SIZE).log_softmax(-1)
    p = log_p.exp()
    expected = -math.log(1 - float(p[0, 2, 1])) - math.log(1 - float(p[0, 3, 1])) - math.log(1 - float(p[0, 3, 2]))
    assert float(penalties.repetition(log_p, marked(ids, labels, real), 4)) == pytest.approx(expected, rel=1e-5)


def test_penalties_have_the_slopes_of_float64_differences() -> None:
    torch.manual_seed(2)
    ids = torch.randint(SIZE, (2, 5))
    labels = ids.roll(-1, 1)
    known = marked(ids, labels)._replace(early_BL=torch.ones_like(ids, dtype=torch.bool))

    def total(logits: Tensor) -> Tensor:
        return sum((weight * value for _, weight, value in penalties.sums(ALL, logits.log_softmax(-1), known, EOS)), torch.zeros(()))

    assert torch.autograd.gradcheck(total, torch.randn(2, 5, SIZE, dtype=torch.float64, requires_grad=True))


def test_a_repetition_that_is_all_but_certain_still_has_a_slope() -> None:
    logits = torch.zeros(1, 1, 3)
    logits[0, 0, 1] = 14.0
    logits.requires_grad_()
    known = marked(torch.tensor([[1]]), torch.tensor([[2]]))
    (slope,) = torch.autograd.grad(penalties.repetition(logits.log_softmax(-1), known, 1), logits)
    assert slope[0, 0, 1] == pytest.approx(1.0, abs=0.2)


def test_batches_of_a_step_may_be_cut_anywhere() -> None:
    """Few tokens are early, and not equally many in each batch: a mean over the early ones of each batch would differ."""
    torch.manual_seed(3)
    ids = torch.randint(SIZE - 1, (4, 8))
    labels = ids.roll(-1, 1)
    labels[0, 2:] = IGNORED
    whole = {"input_ids": ids, "labels": labels}
    run = load("starter", overrides=["training.max_steps=1"], environ={})

    def gradient(batches: list[dict[str, Tensor]]) -> Tensor:
        engine = SingleEngine(run, LanguageModelling({"model": Table()}, ALL, eos_id=EOS), torch.device("cpu"), 1)
        engine.gradients(batches)
        return engine.gradient.clone()

    parts = [{name: value[part] for name, value in whole.items()} for part in (slice(0, 1), slice(1, 4))]
    assert torch.allclose(gradient([whole]), gradient(parts), atol=1e-7)
