"""fp8 on a GPU: kernels that round to e4m3 with a scale for each row or each column, and torch's products of such numbers.

Each is an operator of its own, so that torch.compile takes it as it is. A scale is the largest magnitude over what e4m3 holds, times the
head-room. Where scales are kept, new ones are taken if `renews` is not 0, and for those that are 0.

Shapes: E experts, N rows of a matrix, K its columns; a plain matrix has no E.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _DEPTH = 32, 128
"""Columns of a matrix that one program rounds, and rows that it reads at once."""


@triton.jit
def _scale_and_inverse(found, kept, renews, place, there, head_room, KEPT: tl.constexpr):
    scale = found * (head_room / 448.0)
    if KEPT:
        known = tl.load(kept + place, mask=there, other=0.0)
        scale = tl.where((tl.load(renews) != 0.0) | (known == 0.0), scale, known)
    return scale, tl.where(scale > 0.0, 1.0 / scale, 0.0)


@triton.jit
def _by_rows(x, kept, renews, codes, scales, width, head_room, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = column < width
    values = tl.load(x + row * width + column, mask=there, other=0.0).to(tl.float32)
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(values), 0), kept, renews, row, True, head_room, KEPT)
    rounded = tl.minimum(tl.maximum(values * inverse, -448.0), 448.0)
    tl.store(codes + row * width + column, rounded.to(tl.float8e4nv), mask=there)
    tl.store(scales + row, scale)


@triton.jit
def _by_columns(
    x, kept, renews, codes, scales, height, width, head_room, KEPT: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    expert, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start, inside = expert * height * width, column < width
    largest = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, height, DEPTH):
        row = first + tl.arange(0, DEPTH)
        there = (row < height)[:, None] & inside[None, :]
        values = tl.load(x + start + row[:, None] * width + column[None, :], mask=there, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(values), 0))
    scale, inverse = _scale_and_inverse(largest, kept, renews, expert * width + column, inside, head_room, KEPT)
    tl.store(scales + expert * width + column, scale, mask=inside)
    for first in range(0, height, DEPTH):
        row = first + tl.arange(0, DEPTH)
        there = (row < height)[:, None] & inside[None, :]
        values = tl.load(x + start + row[:, None] * width + column[None, :], mask=there, other=0.0).to(tl.float32)
        rounded = tl.minimum(tl.maximum(values * inverse[None, :], -448.0), 448.0).to(tl.float8e4nv)
        tl.store(codes + start + column[:, None] * height + row[None, :], tl.trans(rounded), mask=tl.trans(there))


_SCHEMA = "(Tensor x, Tensor? kept, Tensor? renews, float head_room) -> (Tensor, Tensor)"


@torch.library.custom_op("shoal::fp8_by_rows", mutates_args=(), schema=_SCHEMA)
def by_rows(x: Tensor, kept: Tensor | None, renews: Tensor | None, head_room: float) -> tuple[Tensor, Tensor]:
    """[..., N, K] → numbers of the same shape, scales [..., N]."""
    x = x.contiguous()
    codes, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(x.shape[:-1], device=x.device)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    given = (scales, scales) if kept is None or renews is None else (kept, renews)
    if scales.numel():
        how = {"KEPT": kept is not None, "BLOCK": block, "num_warps": 8 if block >= 4096 else 4 if block >= 1024 else 1}
        _by_rows[(scales.numel(),)](x, *given, codes, scales, width, head_room, **how)
    return codes, scales


@torch.library.custom_op("shoal::fp8_by_columns", mutates_args=(), schema=_SCHEMA)
def by_columns(x: Tensor, kept: Tensor | None, renews: Tensor | None, head_room: float) -> tuple[Tensor, Tensor]:
    """[..., N, K] → its transpose [..., K, N] as numbers, scales [..., K]."""
    x = x.contiguous()
    (height, width), before = x.shape[-2:], x.shape[:-2]
    codes, scales = x.new_empty((*before, width, height), dtype=torch.float8_e4m3fn), torch.empty((*before, width), device=x.device)
    given = (scales, scales) if kept is None or renews is None else (kept, renews)
    grid = (triton.cdiv(width, _COLUMNS), before.numel())
    _by_columns[grid](x, *given, codes, scales, height, width, head_room, kept is not None, _COLUMNS, _DEPTH, num_warps=4)
    return codes, scales


@torch.library.custom_op(
    "shoal::fp8_product",
    mutates_args=(),
    schema="(Tensor codes, Tensor scales, Tensor weight, Tensor weight_scales, Tensor? ends) -> Tensor",
)
def product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, ends: Tensor | None) -> Tensor:
    """Rows [R, K] times the matrix [N, K] transposed, or those of the experts whose last rows end at `ends`."""
    if ends is None:
        sides = (scales[:, None], weight_scales[None, :])
        return torch._scaled_mm(codes, weight.t(), *sides, out_dtype=torch.bfloat16, use_fast_accum=True)
    return torch._scaled_grouped_mm(
        codes, weight.transpose(-2, -1), scales, weight_scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


@by_rows.register_fake
def _(x: Tensor, kept: Tensor | None, renews: Tensor | None, head_room: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:-1], dtype=torch.float32)


@by_columns.register_fake
def _(x: Tensor, kept: Tensor | None, renews: Tensor | None, head_room: float) -> tuple[Tensor, Tensor]:
    turned = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    return x.new_empty(turned, dtype=torch.float8_e4m3fn), x.new_empty(turned[:-1], dtype=torch.float32)


@product.register_fake
def _(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, ends: Tensor | None) -> Tensor:
    return codes.new_empty((codes.shape[0], weight.shape[-2]), dtype=torch.bfloat16)
