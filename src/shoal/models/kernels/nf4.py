"""Weights of 4 bits (nf4) restored on a GPU in one pass: half a byte is read and one number written for each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS, _WARPS = 32, 4
"""Blocks of weights that a program restores."""


@triton.jit
def _restore(codes, scales, table, weights, count, BLOCKS: tl.constexpr, HALF: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (block < count)[:, None]
    places = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    pair = tl.load(codes + places, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + block, mask=block < count, other=0.0)[:, None]
    first, second = tl.load(table + (pair >> 4)) * scale, tl.load(table + (pair & 15)) * scale
    pairs = tl.reshape(tl.join(first, second), (BLOCKS, 2 * HALF))
    targets = block[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(weights + targets, pairs.to(weights.dtype.element_ty), mask=inside)


def restore(codes: Tensor, scales: Tensor, table: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The weights, flat, blocks of `block` of them with one scale. `table`: the 16 values, in units of the scale."""
    count = scales.numel()
    weights = torch.empty(count * block, dtype=dtype, device=codes.device)
    _restore[(triton.cdiv(count, _BLOCKS),)](codes, scales, table, weights, count, BLOCKS=_BLOCKS, HALF=block // 2, num_warps=_WARPS)
    return weights
