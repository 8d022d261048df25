"""SwiGLU on a GPU.

Of experts, with each row's gate multiplied in: one pass over the rows forward, one backward, which also gives the gates' slopes.
torch.compile reads the rows twice for those. Of other layers the backward pass alone: forward, torch.compile joins it with what stands
before, but backward it computes both halves of the slopes for each half.

Rows from `total` on belong to no expert: they may hold anything, and become zeros, as do their slopes.

Shapes: R rows, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 1024, 4


@triton.jit
def _forward(inner, gates, total, found, width: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    real, weight = row < tl.load(total), tl.load(gates + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = (column < width) & real
        x = tl.load(inner + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
        content = tl.load(inner + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(found + row * width + column, x * tl.sigmoid(x) * content * weight, mask=column < width)


@triton.jit
def _backward(inner, gates, total, slopes, for_inner, for_gates, width: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    real, weight = row < tl.load(total), tl.load(gates + row)
    for_gate = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        mask = inside & real
        x = tl.load(inner + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
        content = tl.load(inner + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(slopes + row * width + column, mask=mask, other=0.0).to(tl.float32)
        share = tl.sigmoid(x)
        activated = x * share
        for_gate += slope * activated * content
        slope *= weight
        tl.store(for_inner + row * 2 * width + column, slope * content * share * (1.0 + x * (1.0 - share)), mask=inside)
        tl.store(for_inner + row * 2 * width + width + column, slope * activated, mask=inside)
    tl.store(for_gates + row, tl.sum(for_gate, 0))


@torch.library.custom_op("shoal::swiglu", mutates_args=())
def _swiglu(inner_RI: Tensor, gates_R: Tensor, total: Tensor) -> Tensor:
    found = inner_RI.new_empty(len(inner_RI), inner_RI.shape[1] // 2)
    _forward[(len(found),)](inner_RI, gates_R, total, found, found.shape[1], _BLOCK, num_warps=_WARPS)
    return found


@torch.library.custom_op("shoal::swiglu_backward", mutates_args=())
def _swiglu_backward(inner_RI: Tensor, gates_R: Tensor, total: Tensor, slope_RI: Tensor) -> tuple[Tensor, Tensor]:
    for_inner, for_gates = torch.empty_like(inner_RI), torch.empty_like(gates_R)
    arguments = (slope_RI.contiguous(), for_inner, for_gates)
    _backward[(len(inner_RI),)](inner_RI, gates_R, total, *arguments, slope_RI.shape[1], _BLOCK, num_warps=_WARPS)
    return for_inner, for_gates


@_swiglu.register_fake
def _(inner_RI: Tensor, gates_R: Tensor, total: Tensor) -> Tensor:
    return inner_RI.new_empty(inner_RI.shape[0], inner_RI.shape[1] // 2)


@_swiglu_backward.register_fake
def _(inner_RI: Tensor, gates_R: Tensor, total: Tensor, slope_RI: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inner_RI), torch.empty_like(gates_R)


def _slopes(ctx: Any, slope_RI: Tensor) -> tuple[Tensor, Tensor, None]:
    for_inner, for_gates = _swiglu_backward(*ctx.saved_tensors, slope_RI)
    return for_inner, for_gates, None


_swiglu.register_autograd(_slopes, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def swiglu(inner_RI: Tensor, gates_R: Tensor, total: Tensor) -> Tensor:
    """silu(first half) · second half · gate, row by row."""
    return _swiglu(inner_RI, gates_R.float(), total)


@triton.jit
def _plain_backward(inner, slopes, for_inner, width: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(inner + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        content = tl.load(inner + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(slopes + row * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(x)
        tl.store(for_inner + row * 2 * width + column, slope * content * share * (1.0 + x * (1.0 - share)), mask=inside)
        tl.store(for_inner + row * 2 * width + width + column, slope * x * share, mask=inside)


@torch.library.custom_op("shoal::plain_swiglu_backward", mutates_args=())
def _plain_swiglu_backward(inner: Tensor, slope: Tensor) -> Tensor:
    inner, slope = inner.contiguous(), slope.contiguous()
    for_inner, width = torch.empty_like(inner), slope.shape[-1]
    _plain_backward[(slope.numel() // width,)](inner, slope, for_inner, width, _BLOCK, num_warps=_WARPS)
    return for_inner


@_plain_swiglu_backward.register_fake
def _(inner: Tensor, slope: Tensor) -> Tensor:
    return torch.empty_like(inner, memory_format=torch.contiguous_format)


class _PlainSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        ctx.save_for_backward(inner)
        gate, content = inner.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * content

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        found: Tensor = _plain_swiglu_backward(*ctx.saved_tensors, slopes[0])
        return found


def plain_swiglu(inner: Tensor) -> Tensor:
    """silu(first half) · second half, of the last dimension."""
    found: Tensor = _PlainSwiglu.apply(inner)  # type: ignore[no-untyped-call]
    return found
