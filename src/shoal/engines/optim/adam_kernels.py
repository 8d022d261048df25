"""The step of Adam on a GPU in two kernels: the norm of the gradient, and everything else.

Gradients stay where the backward pass left them, as tensors of bf16 or fp32: the kernels are given their addresses. A program works on one
block of a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.engines.optim.adam_state import BLOCK, AdamRates, GradientClip, MomentBuffer
from shoal.updates.layout import FlatNetwork, ParameterLayout

_WARPS = 4


@triton.jit
def _gradient(addresses, owners, firsts, sizes, block, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """A block of the gradient, its parameter, the places in the parameter, and which of them there are.

    The last bit of an address says that numbers of bf16 are there; 0: there is no gradient.
    """
    owner = tl.load(owners + block)
    inside = (block - tl.load(firsts + owner)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size, address = tl.load(sizes + owner), tl.load(addresses + owner)
    half = address & 1
    address = address - half
    if ALIGNED:  # then many numbers are loaded at once
        size, address = tl.multiple_of(size, 16), tl.multiple_of(address, 16)
    mask = inside < size
    if half == 1:
        slope = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + inside, mask=mask, other=0.0).to(tl.float32)
    else:
        slope = tl.load(address.to(tl.pointer_type(tl.float32)) + inside, mask=mask & (address != 0), other=0.0)
    return slope, owner, inside, mask


@triton.jit
def _squares(addresses, owners, firsts, sizes, sums, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    slope, _, _, _ = _gradient(addresses, owners, firsts, sizes, block, ALIGNED, BLOCK)
    tl.store(sums + block, tl.sum(slope * slope, 0))


@triton.jit
def _chances(offsets, seed):
    bits = offsets.to(tl.uint32) ^ seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return (bits ^ (bits >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def _read(values, scale, offsets, mask, KIND: tl.constexpr, ROOT: tl.constexpr):
    wide = tl.load(values + offsets, mask=mask, other=0.0).to(tl.float32)
    if KIND == "fp8":
        wide = wide * scale
        if ROOT:
            wide = wide * wide
    return wide


@triton.jit
def _write(values, scales, block, x, offsets, mask, seed, alive, KIND: tl.constexpr, ROOT: tl.constexpr):
    if KIND == "fp32":
        tl.store(values + offsets, x, mask=mask)
    if KIND == "bf16":
        bits = (x.to(tl.int32, bitcast=True) + (_chances(offsets, seed) & 0xFFFF)) & -0x10000
        tl.store(values + offsets, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)
    if KIND == "fp8":
        if ROOT:
            x = tl.sqrt_rn(x)
        x = tl.where(mask, x, 0.0)
        exponent = tl.maximum((tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) >> 23) - 7, 1)
        size = tl.abs(x) * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        chance = _chances(offsets, seed) & 0xFFFFF
        normal = ((size.to(tl.int32, bitcast=True) + chance) & -0x100000).to(tl.float32, bitcast=True)
        small = tl.floor(size * 512.0 + chance.to(tl.float32) * (1.0 / 1048576.0)) * (1.0 / 512.0)
        rounded = tl.minimum(tl.where(size >= 0.015625, normal, small), 240.0)
        if ROOT:
            rounded = tl.where(size > 0, tl.maximum(rounded, 1.0 / 512.0), 0.0)
        tl.store(values + offsets, tl.where(x < 0, -rounded, rounded).to(tl.float8e4nv), mask=mask)
        tl.store(scales + block, (exponent << 23).to(tl.float32, bitcast=True), mask=alive)


@triton.jit(do_not_specialize=["first_seed", "second_seed"])
def _step(
    addresses, owners, firsts, sizes, offsets, vector, shadow, first, second, first_scales, second_scales, norm, limit,
    learning, first_decay, second_decay, eps, decay, first_share, second_share, first_seed, second_seed,
    CLIP: tl.constexpr, SKIP: tl.constexpr, DECOUPLED: tl.constexpr, SHADOW: tl.constexpr, KIND: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    slope, owner, inside, mask = _gradient(addresses, owners, firsts, sizes, block, ALIGNED, BLOCK)
    offset = tl.load(offsets + owner)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    place, alive = offset + inside, True
    if CLIP:
        length = tl.load(norm)
        slope = slope * tl.minimum(limit / (length + 1e-6), 1.0)
        if SKIP:  # where the norm is not finite nothing is read or written
            alive = tl.abs(length) < float("inf")
            mask = mask & (tl.abs(tl.zeros_like(slope) + length) < float("inf"))
    scale, second_scale = 1.0, 1.0
    if KIND == "fp8":
        scale, second_scale = tl.load(first_scales + block), tl.load(second_scales + block)
    weights = tl.load(vector + place, mask=mask, other=0.0)
    m = _read(first, scale, place, mask, KIND, False)
    v = _read(second, second_scale, place, mask, KIND, True)
    if DECOUPLED:
        weights = weights * (1.0 - learning * decay)
    else:
        slope = slope + decay * weights
    m = m + (1.0 - first_decay) * (slope - m)
    v = second_decay * v + (1.0 - second_decay) * slope * slope
    weights = weights - learning / first_share * m / (tl.sqrt(v) / second_share + eps)
    tl.store(vector + place, weights, mask=mask)
    if SHADOW:
        tl.store(shadow + place, weights.to(tl.bfloat16), mask=mask)
    _write(first, first_scales, block, m, place, mask, first_seed, alive, KIND, False)
    _write(second, second_scales, block, v, place, mask, second_seed, alive, KIND, True)


class AdamKernels:
    """The kernels for one layout: where its blocks are."""

    def __init__(self, layout: ParameterLayout, device: torch.device) -> None:
        counts = torch.tensor([-(-slot.size // BLOCK) for slot in layout.slots])
        self.blocks = int(counts.sum())
        self._owners = torch.repeat_interleave(torch.arange(len(counts)), counts).int().to(device)
        self._firsts = (counts.cumsum(0) - counts).int().to(device)
        self._sizes = torch.tensor([slot.size for slot in layout.slots], device=device)
        self._offsets = torch.tensor([slot.offset for slot in layout.slots], device=device)
        self._even = all(slot.size % 16 == 0 and slot.offset % 16 == 0 for slot in layout.slots)
        self._addresses: tuple[list[int], Tensor] = ([], torch.empty(0))
        self._sums = torch.empty(self.blocks, device=device)

    def norm(self, sources: Sequence[Tensor | None]) -> Tensor:
        _squares[(self.blocks,)](*self._table(sources), self._sums, self._aligned(), BLOCK, num_warps=_WARPS)
        return self._sums.sum().sqrt()

    def step(
        self,
        network: FlatNetwork,
        sources: Sequence[Tensor | None],
        first: MomentBuffer,
        second: MomentBuffer,
        rates: AdamRates,
        decoupled: bool,
        clip: GradientClip | None,
        seeds: tuple[int, int],
    ) -> None:
        table, vector = self._table(sources), network.vector
        shadow = vector if network.shadow is None else network.shadow
        places = (self._offsets, vector, shadow, first.values, second.values, first.scales, second.scales)
        limit = (vector, 0.0) if clip is None else (clip.norm, clip.limit)
        how: dict[str, Any] = {"CLIP": clip is not None, "SKIP": clip is not None and clip.skip, "DECOUPLED": decoupled}
        how |= {"SHADOW": network.shadow is not None, "KIND": first.kind, "ALIGNED": self._aligned(), "BLOCK": BLOCK}
        _step[(self.blocks,)](*table, *places, *limit, *rates, *seeds, **how, num_warps=_WARPS)

    def _table(self, sources: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The addresses, copied to the GPU where they are new: mostly they are those of the step before."""
        own = [0 if one is None else one.data_ptr() | (one.dtype == torch.bfloat16) for one in sources]
        if own != self._addresses[0]:
            self._addresses = (own, torch.tensor(own).to(self._sums.device, non_blocking=True))
        return self._addresses[1], self._owners, self._firsts, self._sizes

    def _aligned(self) -> bool:
        return self._even and not any(address & 14 for address in self._addresses[0])
