"""Penalties of a language model besides cross-entropy: for repeating a token, and for ending too early.

Every penalty is a sum over the tokens that count. The caller divides it by their number, so batches of any size add up to the same loss.
The right token is never penalised.

Letters: B batch, L length, V vocabulary, W window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.config.schema.training import Penalties

NAMES = ("repetition", "immediate_repetition", "early_end")
CERTAIN = 1e-6
"""Lower limit of 1 − p: 32-bit logits are not more precise for a token that is almost certain."""
NOTHING = -1
"""Marks padding: no token has this number."""


class Marks(NamedTuple):
    """The inputs of the penalties, computed from a batch."""

    labels_BL: Tensor
    counted_BL: Tensor
    seen_BL: Tensor
    """The tokens, and NOTHING where there is padding."""
    again_BL: Tensor
    """Where in the sequence the same token stands next; its length if it does not. So each token of a window is punished once."""
    early_BL: Tensor
    """Whether an end here would be too early."""
    behind_BL: Tensor
    """How many tokens before it belong to the same row, or to the same document of a packed row."""


def weights(settings: Penalties) -> tuple[float, float, float]:
    """In the order of NAMES."""
    return settings.repetition_weight, settings.immediate_repetition_weight, settings.eos_weight


def marks(
    input_ids_BL: Tensor,
    labels_BL: Tensor,
    counted_BL: Tensor,
    real_BL: Tensor | None,
    early_BL: Tensor,
    lengths_BM: Tensor | None = None,
) -> Marks:
    """`real_BL`: False at padding. `lengths_BM`: tokens of each document of packed rows."""
    seen_BL = input_ids_BL if real_BL is None else input_ids_BL.masked_fill(~real_BL.bool(), NOTHING)
    behind_BL = torch.arange(input_ids_BL.shape[1], device=input_ids_BL.device).expand_as(input_ids_BL)
    if lengths_BM is not None:
        behind_BL = behind_BL - (behind_BL * document_starts(lengths_BM, input_ids_BL.shape[1])).cummax(1).values
    return Marks(labels_BL, counted_BL, seen_BL, _next_places(seen_BL), early_BL & counted_BL, behind_BL)


def document_starts(lengths_BM: Tensor, length: int) -> Tensor:
    """True at the first token of each document of packed rows, and of the padding behind them."""
    starts_BL = torch.zeros(len(lengths_BM), length + 1, dtype=torch.bool, device=lengths_BM.device)
    starts_BL[:, 0] = True
    return starts_BL.scatter_(1, lengths_BM.cumsum(1), True)[:, :length]


def _next_places(ids_BL: Tensor) -> Tensor:
    """Sorted by token, equal ones stand side by side, in the order of their places."""
    length = ids_BL.shape[1]
    sorted_BL, order_BL = ids_BL.sort(dim=1, stable=True)
    following_BL = torch.where(sorted_BL[:, :-1] == sorted_BL[:, 1:], order_BL[:, 1:], length)
    return torch.empty_like(order_BL).scatter_(1, order_BL, F.pad(following_BL, (0, 1), value=length))


def sums(settings: Penalties, log_p_BLV: Tensor, marked: Marks, eos_id: int | None) -> Iterator[tuple[str, float, Tensor]]:
    """The penalties that are switched on: name, weight, differentiable sum over the tokens that count."""
    if settings.repetition_weight:
        yield "repetition", settings.repetition_weight, repetition(log_p_BLV, marked, settings.repetition_window)
    if settings.immediate_repetition_weight:
        wrong_BL = marked.counted_BL & (marked.seen_BL != NOTHING) & (marked.seen_BL != marked.labels_BL)
        p_BL = log_p_BLV.gather(-1, marked.seen_BL.clamp(min=0).unsqueeze(-1)).squeeze(-1).exp()
        yield "immediate_repetition", settings.immediate_repetition_weight, (p_BL * wrong_BL).sum()
    if settings.eos_weight and eos_id is not None:
        wrong_BL = marked.early_BL & (marked.labels_BL != eos_id)
        yield "early_end", settings.eos_weight, (log_p_BLV[..., eos_id].exp() * wrong_BL).sum()


def repetition(log_p_BLV: Tensor, marked: Marks, window: int) -> Tensor:
    """−Σ log(1 − p) over the tokens of the window before, each once."""
    length = marked.seen_BL.shape[1]
    window = min(window, length)
    seen_BLW = F.pad(marked.seen_BL, (window - 1, 0), value=NOTHING).unfold(1, window, 1)
    again_BLW = F.pad(marked.again_BL, (window - 1, 0)).unfold(1, window, 1)
    place_L1 = torch.arange(length, device=seen_BLW.device).unsqueeze(-1)
    back_W = torch.arange(window - 1, -1, -1, device=seen_BLW.device)
    wrong_BLW = (seen_BLW != NOTHING) & (again_BLW > place_L1) & (seen_BLW != marked.labels_BL.unsqueeze(-1))
    wrong_BLW &= back_W <= marked.behind_BL.unsqueeze(-1)
    unlikely_BLW = _Unlikelihood.apply(log_p_BLV.gather(-1, seen_BLW.clamp(min=0)))  # type: ignore[no-untyped-call]
    return (unlikely_BLW * (wrong_BLW & marked.counted_BL.unsqueeze(-1))).sum()


class _Unlikelihood(torch.autograd.Function):
    """−log(1 − p) of log p. A plain `clamp` would let go of just those tokens that are punished most."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor) -> Tensor:
        p = log_p.exp()
        ctx.save_for_backward(p)
        return -(1 - p).clamp(min=CERTAIN).log()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return gradients[0] * p / (1 - p).clamp(min=CERTAIN)
