"""Running means of an optimizer in types that torch's own does not keep them in, and what a step of Adam multiplies with.

Means in bf16 and fp8 are rounded by chance: otherwise small changes would never add up. The chance is a hash of the step and the place in
the vector, so a step that is repeated after a resume comes out the same. fp8 is e4m3 with a power of two as scale for each block of a
parameter; the mean of squares is kept as its root, and never as 0 where it is not. What has been rounded once is not changed by being
rounded again, so checkpoints hold the means as plain tensors, which any engine reads.

Shapes: N blocks, B numbers in a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.updates.layout import ParameterLayout, Slot

BLOCK = 2048
"""Numbers that share a scale in fp8, and that one program of the kernel steps."""
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_LARGEST, _SMALLEST_NORMAL, _SMALLEST = 240.0, 2.0**-6, 2.0**-9
"""Of e4m3. A block's scale maps its largest number to between 128 and 256, and 256 would need another scale."""


class AdamRates(NamedTuple):
    """What a step multiplies with."""

    learning: float
    first: float
    second: float
    eps: float
    decay: float
    first_share: float
    """1 − first^step: how much of a mean has been seen so far; `second_share` is the root of the same."""
    second_share: float


class GradientClip(NamedTuple):
    """A limit on the gradient's norm, which stays on the device."""

    norm: Tensor
    limit: float
    skip: bool
    """Take no step where the norm is not finite."""

    def factor(self) -> Tensor:
        return (self.limit / (self.norm + 1e-6)).clamp(max=1.0)


class MomentBuffer:
    """A running mean, as its type keeps it. `root`: fp8 keeps the root of it."""

    def __init__(self, kind: str, layout: ParameterLayout, device: torch.device, *, root: bool) -> None:
        self.layout, self.kind, self.root = layout, kind, root
        self.values = torch.zeros(layout.size, dtype=_TYPES[kind], device=device)
        self.firsts = [0]
        for slot in layout.slots:
            self.firsts.append(self.firsts[-1] - -slot.size // BLOCK)
        self.scales = torch.ones(self.firsts[-1] if kind == "fp8" else 0, device=device)

    def read(self, number: int) -> Tensor:
        """The mean of one parameter, as a row."""
        values = self.values[span_of(self.layout.slots[number])].float()
        if self.kind != "fp8":
            return values
        wide = (_in_blocks(values) * self._scales_of(number)).flatten()[: len(values)]
        return wide.square() if self.root else wide

    def write(self, number: int, value: Tensor, seed: int) -> None:
        span = span_of(self.layout.slots[number])
        if self.kind == "fp32":
            self.values[span] = value
            return
        chance = chances(torch.arange(span.start, span.stop, device=value.device), seed)
        if self.kind == "bf16":
            self.values[span] = rounded_to_bf16(value, chance)
            return
        codes, scales = rounded_to_fp8(_in_blocks(value.sqrt() if self.root else value), _in_blocks(chance), at_least=self.root)
        self.values[span] = codes.flatten()[: len(value)].to(self.values.dtype)
        self._scales_of(number).copy_(scales)

    def _scales_of(self, number: int) -> Tensor:
        return self.scales[self.firsts[number] : self.firsts[number + 1], None]

    def wide(self) -> Tensor:
        """The mean of the whole vector in a type that holds it exactly: a root of 4 binary digits has a square of 8."""
        if self.kind != "fp8":
            return self.values
        return torch.cat([self.read(number).to(torch.bfloat16) for number in range(len(self.layout.slots))])

    def load(self, wide: Tensor) -> None:
        for number, slot in enumerate(self.layout.slots):
            self.write(number, wide[span_of(slot)].float(), seed=0)


# --- stochastic rounding: the same in `adam_kernels.py` -------------------------------------------------------


def chances(places: Tensor, seed: int) -> Tensor:
    """32 bits for each place, as 64-bit integers: the last part of MurmurHash3."""
    bits = (places & 0xFFFFFFFF) ^ seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def rounded_to_bf16(x: Tensor, chance: Tensor) -> Tensor:
    bits = x.view(torch.int32) + (chance & 0xFFFF).int()
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


def rounded_to_fp8(x_NB: Tensor, chance_NB: Tensor, *, at_least: bool) -> tuple[Tensor, Tensor]:
    """Numbers in e4m3, and their scales, [N, 1]. `at_least`: what is not 0 does not become 0."""
    exponents_N1 = ((x_NB.abs().amax(1, keepdim=True).view(torch.int32) >> 23) - 7).clamp(min=1)
    scales_N1, inverse_N1 = (exponents_N1 << 23).view(torch.float32), ((254 - exponents_N1) << 23).view(torch.float32)
    size, chance = x_NB.abs() * inverse_N1, (chance_NB & 0xFFFFF).int()
    normal = ((size.view(torch.int32) + chance) & -0x100000).view(torch.float32)
    small = torch.floor(size / _SMALLEST + chance * 2.0**-20) * _SMALLEST
    rounded = torch.where(size >= _SMALLEST_NORMAL, normal, small).clamp(max=_LARGEST)
    if at_least:
        rounded = torch.where(size > 0, rounded.clamp(min=_SMALLEST), 0.0)
    return rounded.copysign(x_NB), scales_N1


def _in_blocks(row: Tensor) -> Tensor:
    return nn.functional.pad(row, (0, -len(row) % BLOCK)).view(-1, BLOCK)


def span_of(slot: Slot) -> slice:
    return slice(slot.offset, slot.offset + slot.size)
