"""Log-probabilities of tokens, and gradients of a loss on them, without the logits of all tokens at once.

With a large vocabulary the logits of a mini-batch take far more memory than the model's hidden states, so they are computed for a chunk of
tokens at a time. The gradient of a loss that is a sum over tokens is known as soon as a token's log-probability is, so the chunk's part of
the output matrix's gradient is computed at once, and logits are computed only once.

Shapes: N tokens, n tokens of a piece, D width, V vocabulary, W rows of a matrix that may be wider than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.work_buffer import WorkBuffer

_LOGITS_AT_ONCE = 1 << 23
"""32 MiB in float32: small beside a model, and large enough for a matrix product to be quick."""
_TIMES_ON_GPU = 8
"""Factor of the chunk size on GPUs, which need larger products."""
_NEVER = -3e4
"""The logit of padding columns: its exponential is 0, and float16 can represent it."""

_CACHED = 1 << 19
"""2 MiB in float32."""
_CAST = 1 << 22
"""Weights of a matrix of few bits that are cast at a time: 16 MiB in float32."""
_CAST_BUFFER = WorkBuffer()
"""For the weights that are cast."""

ToSlopes = Callable[[Tensor, Tensor, slice], list[Tensor]]
"""Figures of some tokens, by their logits, labels and places. In the place of the logits the loss's slope by these is written."""
SlopeOf = Callable[[slice, Tensor, Tensor], tuple[Tensor, float]]
"""Of some tokens, by their places, log-probabilities and entropies: the loss's slope by each log-probability [n], and by any entropy."""


class ChunkedLogProbs(NamedTuple):
    """Log-probabilities and entropies of tokens, and the slopes of a loss by hidden states and output matrix."""

    log_probs_N: Tensor
    entropy_N: Tensor
    hidden_slope_ND: Tensor
    weight_slope_VD: Tensor | None
    """None: the output matrix does not learn."""


class Slopes(NamedTuple):
    """The slopes of a loss by hidden states and output matrix, as in `ChunkedLogProbs`."""

    hidden_slope_ND: Tensor
    weight_slope_VD: Tensor | None


def cross_entropy_of(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, buffer_VD: Tensor | None = None) -> Tensor:
    """The mean cross-entropy of at least one label. A matrix that does not learn is rounded to the type of the hidden states, some rows at
    a time where it has fewer bits. `buffer_VD`: as in `in_pieces`."""
    if not weight_VD.requires_grad and not _is_cast_by_rows(weight_VD, hidden_ND.dtype):
        weight_VD = weight_VD.to(hidden_ND.dtype)
    if not torch.is_grad_enabled():
        return -log_probs_of(hidden_ND, weight_VD, labels_N, 1.0).mean()
    (log_probs_N,), slopes = _each_piece(hidden_ND, weight_VD, labels_N, _cross_entropy_slopes, buffer_VD, 1 / len(labels_N))
    return with_slopes(-log_probs_N.mean(), hidden_ND, weight_VD, slopes)


@torch.no_grad()
def log_probs_of(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, temperature: float) -> Tensor:
    """The log-probability of each label [N], without gradients."""
    wide_WD = _widened(weight_VD)
    found, room_nW = [], _room(hidden_ND, wide_WD, min(len(labels_N), _rows_at_once(weight_VD)))
    for some in _cut(len(labels_N), weight_VD):
        logits_nW = _logits(hidden_ND[some], wide_WD, len(weight_VD), room_nW)
        found += [
            at_temperature(rows_rW, temperature).gather(1, labels_N[rows, None]).squeeze(1)
            for rows, rows_rW in _rows_of(logits_nW, some.start)
        ]
        del logits_nW  # before those of the next piece need as much memory
    return torch.cat(found) if found else hidden_ND.new_zeros(0)


@torch.no_grad()
def in_pieces(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, temperature: float, slope_of: SlopeOf, buffer_VD: Tensor | None = None
) -> ChunkedLogProbs:
    """Log-probabilities and entropies of the labels' tokens, and the slopes of a loss by hidden states and output matrix. `buffer_VD`:
    memory for the latter; None: it is allocated."""

    def to_slopes(logits_nV: Tensor, labels_n1: Tensor, some: slice) -> list[Tensor]:
        pairs = [
            _to_slopes(rows_rV, labels_N[rows, None], temperature, rows, slope_of) for rows, rows_rV in _rows_of(logits_nV, some.start)
        ]
        return [torch.cat(parts) for parts in zip(*pairs, strict=True)]

    (log_probs_N, entropy_N), slopes = _each_piece(hidden_ND, weight_VD, labels_N, to_slopes, buffer_VD)
    return ChunkedLogProbs(log_probs_N, entropy_N, *slopes)


@torch.no_grad()
def _each_piece(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, to_slopes: ToSlopes, buffer_VD: Tensor | None, share: float = 1.0
) -> tuple[list[Tensor], Slopes]:
    """The figures of all tokens, and the slopes, which are `share` times those that `to_slopes` gives."""
    kind, wide_WD = _kind_of_slopes(hidden_ND), _widened(weight_VD)
    weight_slope_WD, room_nW = None, _room(hidden_ND, wide_WD, min(len(labels_N), _rows_at_once(weight_VD)))
    figures, hidden_slopes = list[list[Tensor]](), list[Tensor]()
    for some in _cut(len(labels_N), weight_VD):
        logits_nW = _logits(hidden_ND[some], wide_WD, len(weight_VD), room_nW)
        logits_slope_nW = logits_nW.to(torch.promote_types(logits_nW.dtype, torch.float32))
        del logits_nW
        figures.append(to_slopes(logits_slope_nW, labels_N[some, None], some))
        logits_slope_nW = logits_slope_nW.to(kind)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            hidden_slopes.append(_product(logits_slope_nW, wide_WD).mul_(share))
            if weight_VD.requires_grad:
                scaled_nD = hidden_ND[some].to(kind) * share
                weight_slope_WD = _sum_with(weight_slope_WD, logits_slope_nW.T, scaled_nD, weight_VD.dtype, buffer_VD)
        del logits_slope_nW  # before those of the next piece need as much memory
    weight_slope_VD = None if weight_slope_WD is None else weight_slope_WD[: len(weight_VD)]
    return [torch.cat(parts) for parts in zip(*figures, strict=True)], Slopes(torch.cat(hidden_slopes), weight_slope_VD)


def _kind_of_slopes(hidden_ND: Tensor) -> torch.dtype:
    """As autograd multiplies them, but not in float16: the loss is not scaled up yet where they are formed, and it loses small ones."""
    device = hidden_ND.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    return torch.float32 if kind == torch.float16 else kind


def _widened(weight_VD: Tensor) -> Tensor:
    """The output matrix with more rows, where those are no multiple of 8 on a GPU: products with GPT-2's 50,257 take five times as long."""
    more = _rows_missing(weight_VD)
    return F.pad(weight_VD, (0, 0, 0, more)) if more else weight_VD


def _rows_missing(weight_VD: Tensor) -> int:
    return -len(weight_VD) % 8 if weight_VD.is_cuda else 0


def _logits(hidden_nD: Tensor, wide_WD: Tensor, vocabulary: int, room_nW: Tensor | None = None) -> Tensor:
    """In float32 on a CPU `F.linear` first makes a copy of the matrix in another order. Written so, the product needs none."""
    if room_nW is None:
        logits_nW = F.linear(hidden_nD, wide_WD)
    else:
        logits_nW = room_nW[: len(hidden_nD)]
        for rows, part_rD in _cast_rows(wide_WD, hidden_nD.dtype):
            torch.mm(part_rD, hidden_nD.T, out=logits_nW.T[rows])
    logits_nW[:, vocabulary:] = _NEVER
    return logits_nW


def _product(slope_nW: Tensor, wide_WD: Tensor) -> Tensor:
    parts = _cast_rows(wide_WD, slope_nW.dtype)
    rows, part_rD = next(parts)
    found_nD = slope_nW[:, rows] @ part_rD
    for rows, part_rD in parts:
        found_nD.addmm_(slope_nW[:, rows], part_rD)
    return found_nD


def _is_cast_by_rows(matrix: Tensor, kind: torch.dtype) -> bool:
    return matrix.device.type == "cpu" and matrix.element_size() < kind.itemsize


def _cast_rows(wide_WD: Tensor, kind: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The rows of the output matrix in a type: on a CPU some at a time, where it has fewer bits, since they would take gigabytes. Such rows
    are valid until the next ones are taken."""
    if not _is_cast_by_rows(wide_WD, kind):
        yield slice(0, len(wide_WD)), wide_WD.to(kind)
        return
    step = max(1, _CAST // wide_WD.shape[1])
    for start in range(0, len(wide_WD), step):
        rows_rD = wide_WD[start : start + step]
        yield slice(start, start + step), _CAST_BUFFER.take(rows_rD.numel(), kind).view(rows_rD.shape).copy_(rows_rD)


def _room(hidden_ND: Tensor, wide_WD: Tensor, rows: int) -> Tensor | None:
    """Memory for the logits of a piece on a CPU. If each piece allocated its own, the heap would keep holes that the next does not fit."""
    if hidden_ND.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    if hidden_ND.dtype != wide_WD.dtype and not _is_cast_by_rows(wide_WD, hidden_ND.dtype):
        return None
    return hidden_ND.new_empty(rows, len(wide_WD))


def _rows_of(whole_nV: Tensor, start: int) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time, with their places among all tokens: few enough to stay in a processor's cache; a GPU takes all."""
    most = len(whole_nV) if whole_nV.is_cuda else max(1, _CACHED // whole_nV.shape[1])
    for rows_rV in torch.split(whole_nV, most):
        yield slice(start, start + len(rows_rV)), rows_rV
        start += len(rows_rV)


def _to_slopes(logits_rV: Tensor, labels_r1: Tensor, temperature: float, rows: slice, slope_of: SlopeOf) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of some tokens. In the place of their logits the loss's slope by these is written.

    Exponentials, which are what costs time here, are taken once.
    """
    scores_rV = logits_rV if temperature == 1 else logits_rV.div_(temperature)
    scores_rV.sub_(scores_rV.amax(-1, keepdim=True))
    p_rV = scores_rV.exp()
    total_r1 = p_rV.sum(-1, keepdim=True)
    p_rV.div_(total_r1)
    log_p_rV = scores_rV.sub_(total_r1.log())
    log_probs_r, entropy_r = log_p_rV.gather(1, labels_r1).squeeze(1), -torch.einsum("rv,rv->r", p_rV, log_p_rV)
    slope_r, entropy_slope = slope_of(rows, log_probs_r, entropy_r)
    if entropy_slope:
        log_p_rV.add_(entropy_r[:, None]).mul_(-entropy_slope).sub_(slope_r[:, None]).mul_(p_rV)
    else:
        torch.mul(p_rV, -slope_r[:, None], out=log_p_rV)
    log_p_rV.scatter_add_(1, labels_r1, slope_r[:, None])
    if temperature != 1:
        log_p_rV.div_(temperature)
    return log_probs_r, entropy_r


def _cross_entropy_slopes(logits_nV: Tensor, labels_n1: Tensor, some: slice) -> list[Tensor]:
    """Log-probabilities of the labels. In the place of the logits the slope of the sum of their cross-entropy is written."""
    log_p_nV = torch.log_softmax(logits_nV, -1, out=logits_nV)
    log_probs_n1 = log_p_nV.gather(1, labels_n1)
    log_p_nV.exp_().scatter_add_(1, labels_n1, torch.full_like(log_probs_n1, -1))
    return [log_probs_n1.squeeze(1)]


def _sum_with(before_VD: Tensor | None, left_Vn: Tensor, right_nD: Tensor, kind: torch.dtype, buffer_VD: Tensor | None) -> Tensor:
    """A sum of products with one more, in a type at least as precise. The first goes into `buffer_VD`, if that has its shape and type."""
    if before_VD is not None:
        return before_VD.addmm_(left_Vn, right_nD) if before_VD.dtype == left_Vn.dtype else before_VD.add_(left_Vn @ right_nD)
    if buffer_VD is None or len(buffer_VD) != len(left_Vn) or not buffer_VD.dtype == kind == left_Vn.dtype:
        return (left_Vn @ right_nD).to(kind)
    return torch.mm(left_Vn, right_nD, out=buffer_VD.detach())


def _cut(count: int, weight_VD: Tensor) -> Iterator[slice]:
    rows = _rows_at_once(weight_VD)
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def _rows_at_once(weight_VD: Tensor) -> int:
    return max(1, _LOGITS_AT_ONCE * (_TIMES_ON_GPU if weight_VD.is_cuda else 1) // len(weight_VD))


def at_temperature(logits_NV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at a temperature, in float32 at least."""
    scores_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return (scores_NV if temperature == 1 else scores_NV / temperature).log_softmax(-1)


class WithSlopes(torch.autograd.Function):
    """A loss whose gradients were computed together with it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, hidden_ND: Tensor, weight_VD: Tensor, pieces: ChunkedLogProbs | Slopes) -> Tensor:
        ctx.pieces, ctx.kind = pieces, hidden_ND.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        pieces, ctx.pieces = ctx.pieces, None
        hidden, weight = pieces.hidden_slope_ND, pieces.weight_slope_VD
        if slope.device.type != "cpu" or float(slope) != 1:
            hidden, weight = hidden.mul_(slope), None if weight is None else weight.mul_(slope)
        return None, hidden.to(ctx.kind), weight, None


def output_of(model: Any, given: dict[str, Any]) -> Tensor:
    """The output matrix that a model used in a pass with these keyword arguments."""
    used: Tensor | None = given["beside"].output_weight if "beside" in given else None
    own: Tensor = model.output_weight if hasattr(model, "output_weight") else model.product_weight
    return own if used is None else used


def gradient_buffer_of(parameter: Tensor) -> Tensor | None:
    """The memory where the gradient of a parameter will be gathered; None: no engine offers it, or it holds gradients of this step."""
    buffer: Tensor | None = getattr(parameter, "gradient_buffer", None)
    return buffer if parameter.grad is None else None


def with_slopes(loss: Tensor, hidden_ND: Tensor, weight_VD: Tensor, pieces: ChunkedLogProbs | Slopes) -> Tensor:
    """The loss, such that its backward pass gives the slopes that were found with it."""
    return WithSlopes.apply(loss, hidden_ND, weight_VD, pieces)  # type: ignore[no-untyped-call]
