"""fp8 on a GPU: kernels that round to e4m3, and torch's products of such numbers.

Each is an operator of its own, so that torch.compile takes it as it is. A scale is the largest magnitude of a row over what e4m3 holds,
times the head-room. Where a weight's scales are kept, new ones are taken if `renews` is not 0, and for those that are 0. SwiGLU rounds what
it gives while it has it at hand, in both passes: to read it again would take half as long as the product.

Shapes: E experts, N rows of a matrix, K its columns (a plain matrix has no E), R rows of an input, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SIDE = 128
"""Of the square part of a matrix that one program transposes."""


@triton.jit
def _stored(values, codes, offset, mask, inverse):
    tl.store(codes + offset, tl.minimum(tl.maximum(values * inverse, -448.0), 448.0).to(tl.float8e4nv), mask=mask)


@triton.jit
def _weight(x, kept, renews, codes, scales, width, head_room, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < width
    values = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), 0) * (head_room / 448.0)
    if KEPT:
        known = tl.load(kept + row)
        scale = tl.where((tl.load(renews) != 0.0) | (known == 0.0), scale, known)
    tl.store(scales + row, scale)
    _stored(values, codes, row * width + column, mask, tl.where(scale > 0.0, 1.0 / scale, 0.0))


@triton.jit
def _turn(codes, turned, height, width, SIDE: tl.constexpr):
    """Transpose bytes. In a kernel of its own: where one also stores them as they are, ptxas 12.9 mixes up what it turns on Hopper
    (triton-lang/triton issue 11111)."""
    row, column = tl.program_id(1) * SIDE + tl.arange(0, SIDE), tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    start = tl.program_id(2).to(tl.int64) * height * width
    mask = (row < height)[:, None] & (column < width)[None, :]
    found = tl.load(codes + start + row[:, None] * width + column[None, :], mask=mask, other=0)
    mask = (column < width)[:, None] & (row < height)[None, :]
    tl.store(turned + start + column[:, None] * height + row[None, :], tl.trans(found), mask=mask)


@triton.jit
def _rows(x, factors, owners, codes, scales, width, head_room, FACTORS: tl.constexpr, OWNERS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < width
    values = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
    if FACTORS:
        if OWNERS:
            factors += tl.load(owners + row).to(tl.int64) * width
        values = values * tl.load(factors + column, mask=mask, other=0.0)
    scale = tl.max(tl.abs(values), 0) * (head_room / 448.0)
    tl.store(scales + row, scale)
    _stored(values, codes, row * width + column, mask, tl.where(scale > 0.0, 1.0 / scale, 0.0))


@triton.jit
def _swiglu(inner, gates, total, found, codes, scales, width, head_room, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real, weight, inside = row < tl.load(total), tl.load(gates + row), column < width
    mask = inside & real
    x = tl.load(inner + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    content = tl.load(inner + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    values = x * tl.sigmoid(x) * content * weight
    tl.store(found + row * width + column, values, mask=inside)
    scale = tl.max(tl.abs(values), 0) * (head_room / 448.0)
    tl.store(scales + row, scale)
    _stored(values, codes, row * width + column, inside, tl.where(scale > 0.0, 1.0 / scale, 0.0))


@triton.jit
def _swiglu_backward(
    inner, gates, total, slopes, factors, owners, for_inner, for_gates, codes, scales, width, head_room, BLOCK: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real, weight, inside = row < tl.load(total), tl.load(gates + row), column < width
    mask, offset, owner = inside & real, row * 2 * width + column, tl.load(owners + row).to(tl.int64) * 2 * width
    x = tl.load(inner + offset, mask=mask, other=0.0).to(tl.float32)
    content = tl.load(inner + offset + width, mask=mask, other=0.0).to(tl.float32)
    slope = tl.load(slopes + row * width + column, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(x)
    activated = x * share
    tl.store(for_gates + row, tl.sum(slope * activated * content, 0))
    slope *= weight
    first, second = slope * content * share * (1.0 + x * (1.0 - share)), slope * activated
    tl.store(for_inner + offset, first, mask=inside)
    tl.store(for_inner + offset + width, second, mask=inside)
    first = first * tl.load(factors + owner + column, mask=inside, other=0.0)
    second = second * tl.load(factors + owner + width + column, mask=inside, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0)) * (head_room / 448.0)
    inverse = tl.where(scale > 0.0, 1.0 / scale, 0.0)
    tl.store(scales + row, scale)
    _stored(first, codes, offset, inside, inverse)
    _stored(second, codes, offset + width, inside, inverse)


def _how(width: int) -> dict[str, Any]:
    """A program has a whole row at hand."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": 8 if block > 2048 else 4 if block > 1024 else 1}


def _like_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op(
    "shoal::fp8_weight",
    mutates_args=(),
    schema="(Tensor x, Tensor? kept, Tensor? renews, float head_room) -> (Tensor, Tensor, Tensor)",
)
def weight(x: Tensor, kept: Tensor | None, renews: Tensor | None, head_room: float) -> tuple[Tensor, Tensor, Tensor]:
    """[..., N, K] → numbers of the same shape, the same numbers as [..., K, N], scales [..., N]."""
    x = x.contiguous()
    (codes, scales), (height, width) = _like_codes(x), x.shape[-2:]
    turned = codes.new_empty((*x.shape[:-2], width, height))
    given = (scales, scales) if kept is None or renews is None else (kept, renews)
    _weight[(scales.numel(),)](x, *given, codes, scales, width, head_room, kept is not None, **_how(width))
    grid = (triton.cdiv(width, _SIDE), triton.cdiv(height, _SIDE), x.shape[:-2].numel())
    _turn[grid](codes.view(torch.uint8), turned.view(torch.uint8), height, width, _SIDE, num_warps=8)
    return codes, turned, scales


@torch.library.custom_op(
    "shoal::fp8_rows", mutates_args=(), schema="(Tensor x, Tensor? factors, Tensor? owners, float head_room) -> (Tensor, Tensor)"
)
def rows(x: Tensor, factors: Tensor | None, owners: Tensor | None, head_room: float) -> tuple[Tensor, Tensor]:
    """[R, K] → numbers, scales [R]. `factors`: what each column is multiplied with before, by expert; `owners`: each row's expert."""
    x = x.contiguous()
    codes, scales = _like_codes(x)
    given = (scales if factors is None else factors, scales if owners is None else owners)
    if len(x):
        how = {"FACTORS": factors is not None, "OWNERS": owners is not None, **_how(x.shape[1])}
        _rows[(len(x),)](x, *given, codes, scales, x.shape[1], head_room, **how)
    return codes, scales


@torch.library.custom_op("shoal::fp8_swiglu", mutates_args=())
def swiglu(inner: Tensor, gates: Tensor, total: Tensor, head_room: float) -> tuple[Tensor, Tensor, Tensor]:
    """silu(first half) · second half · gate, row by row: in bf16, as numbers, and their scales. Rows from `total` on become zeros."""
    found = inner.new_empty(len(inner), inner.shape[1] // 2)
    codes, scales = _like_codes(found)
    _swiglu[(len(found),)](inner, gates, total, found, codes, scales, found.shape[1], head_room, **_how(found.shape[1]))
    return found, codes, scales


@torch.library.custom_op("shoal::fp8_swiglu_backward", mutates_args=())
def swiglu_backward(
    inner: Tensor, gates: Tensor, total: Tensor, slope: Tensor, factors: Tensor, owners: Tensor, head_room: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The slopes of `inner`, of the gates, and those of `inner` as numbers, times `factors` of each row's expert, with their scales."""
    for_inner, for_gates = torch.empty_like(inner), torch.empty_like(gates)
    codes, scales = _like_codes(inner)
    places, width = (factors, owners, for_inner, for_gates, codes, scales), slope.shape[1]
    _swiglu_backward[(len(inner),)](inner, gates, total, slope.contiguous(), *places, width, head_room, **_how(width))
    return for_inner, for_gates, codes, scales


@torch.library.custom_op(
    "shoal::fp8_product",
    mutates_args=(),
    schema="(Tensor codes, Tensor scales, Tensor weight, Tensor? weight_scales, Tensor? ends) -> Tensor",
)
def product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor | None, ends: Tensor | None) -> Tensor:
    """Rows [R, K] times the matrix [N, K] transposed, or those of the experts whose last rows end at `ends`. No scales: all are 1."""
    if weight_scales is None:
        weight_scales = torch.ones(weight.shape[:-1], device=weight.device)
    if ends is None:
        sides = (scales[:, None], weight_scales[None, :])
        return torch._scaled_mm(codes, weight.t(), *sides, out_dtype=torch.bfloat16, use_fast_accum=True)
    sides = (scales, weight_scales)
    return torch._scaled_grouped_mm(codes, weight.transpose(-2, -1), *sides, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)


@weight.register_fake
def _(x: Tensor, kept: Tensor | None, renews: Tensor | None, head_room: float) -> tuple[Tensor, Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return codes, codes.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2])), x.new_empty(x.shape[:-1], dtype=torch.float32)


@rows.register_fake
def _(x: Tensor, factors: Tensor | None, owners: Tensor | None, head_room: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:-1], dtype=torch.float32)


@swiglu.register_fake
def _(inner: Tensor, gates: Tensor, total: Tensor, head_room: float) -> tuple[Tensor, Tensor, Tensor]:
    found = inner.new_empty((inner.shape[0], inner.shape[1] // 2))
    return found, *_like_codes(found)


@swiglu_backward.register_fake
def _(
    inner: Tensor, gates: Tensor, total: Tensor, slope: Tensor, factors: Tensor, owners: Tensor, head_room: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(inner), torch.empty_like(gates), *_like_codes(inner)


@product.register_fake
def _(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor | None, ends: Tensor | None) -> Tensor:
    return codes.new_empty((codes.shape[0], weight.shape[-2]), dtype=torch.bfloat16)
