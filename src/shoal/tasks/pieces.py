"""Log-probabilities of answers' tokens, and gradients of a loss on them, without the logits of all tokens at once.

A vocabulary is large: the logits of a mini-batch take more memory than the model's hidden states by far. Here some tokens' logits are
made at a time. A loss that is a sum over tokens tells its slope as soon as a token's log-probability is known, so the output matrix's
part of the gradient is formed right then, and the logits are made once.

Shapes: N tokens, n tokens of a piece, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_LOGITS_AT_ONCE = 1 << 22
"""16 MiB in float32: small beside a model, and large enough for a matrix product to be quick."""

SlopeOf = Callable[[slice, Tensor, Tensor], tuple[Tensor, float]]
"""Of some tokens, by their places, log-probabilities and entropies: the loss's slope by each log-probability [n], and by any entropy."""


class Pieces(NamedTuple):
    """What was found out about tokens, piece by piece."""

    log_probs_N: Tensor
    entropy_N: Tensor
    hidden_slope_ND: Tensor
    weight_slope_VD: Tensor | None
    """None: the output matrix does not learn."""


def log_probs_of(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, temperature: float) -> Tensor:
    """How probable each label is [N]; nothing learns from it."""
    found = [
        at_temperature(F.linear(hidden_ND[some], weight_VD), temperature).gather(1, labels_N[some, None]).squeeze(1)
        for some in _cut(len(labels_N), len(weight_VD))
    ]
    return torch.cat(found) if found else hidden_ND.new_zeros(0)


@torch.no_grad()
def in_pieces(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, temperature: float, slope_of: SlopeOf) -> Pieces:
    """Log-probabilities and entropies of the labels' tokens, and the slopes of a loss by hidden states and output matrix."""
    # A loss is not scaled up yet where its slopes are formed, and float16 would lose small ones
    kind = torch.float32 if hidden_ND.dtype == torch.float16 else hidden_ND.dtype
    log_probs, entropies, slopes = [], [], []
    weight_slope_VD = torch.zeros_like(weight_VD) if weight_VD.requires_grad else None
    for some in _cut(len(labels_N), len(weight_VD)):
        log_p_nV = at_temperature(F.linear(hidden_ND[some], weight_VD), temperature)
        p_nV, labels_n1 = log_p_nV.exp(), labels_N[some, None]
        chosen_n, entropy_n = log_p_nV.gather(1, labels_n1).squeeze(1), -(p_nV * log_p_nV).sum(-1)
        slope_n, entropy_slope = slope_of(some, chosen_n, entropy_n)
        logits_slope_nV = log_p_nV.add_(entropy_n[:, None]).mul_(-entropy_slope) if entropy_slope else log_p_nV.zero_()
        logits_slope_nV = logits_slope_nV.sub_(slope_n[:, None]).mul_(p_nV).scatter_add_(1, labels_n1, slope_n[:, None])
        logits_slope_nV = logits_slope_nV.div_(temperature).to(kind)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            slopes.append(logits_slope_nV @ weight_VD.to(kind))
            if weight_slope_VD is not None:
                weight_slope_VD += logits_slope_nV.T @ hidden_ND[some].to(kind)
        log_probs.append(chosen_n)
        entropies.append(entropy_n)
    return Pieces(torch.cat(log_probs), torch.cat(entropies), torch.cat(slopes), weight_slope_VD)


def _cut(count: int, vocabulary: int) -> Iterator[slice]:
    rows = max(1, _LOGITS_AT_ONCE // vocabulary)
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def at_temperature(logits_NV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at a temperature, in float32 at least."""
    return (logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature).log_softmax(-1)


class WithSlopes(torch.autograd.Function):
    """A loss whose slopes by some tensors are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, hidden_ND: Tensor, weight_VD: Tensor, pieces: Pieces) -> Tensor:
        ctx.pieces, ctx.kind = pieces, hidden_ND.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        pieces, ctx.pieces = ctx.pieces, None
        weight = pieces.weight_slope_VD
        return None, (pieces.hidden_slope_ND * slope).to(ctx.kind), None if weight is None else weight.mul_(slope), None


def with_slopes(loss: Tensor, hidden_ND: Tensor, weight_VD: Tensor, pieces: Pieces) -> Tensor:
    """The loss, such that its backward pass gives the slopes that were found with it."""
    attached: Tensor = WithSlopes.apply(loss, hidden_ND, weight_VD, pieces)  # type: ignore[no-untyped-call]
    return attached
