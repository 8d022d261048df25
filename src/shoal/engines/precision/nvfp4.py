"""Four-bit floating point (e2m1) with a scale in e4m3 for each block of 16 numbers and one for all of them.

Numbers are rounded as torchao's reference rounds them, to the bit. They stay in 32-bit floats, with the values that four bits can hold.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 16
_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_SMALLEST_SCALE = torch.finfo(torch.float8_e4m3fn).tiny
_SIGNS = 0b1011000111010010
"""Which rows of the Hadamard matrix are turned round: always the same, since both factors of a product must be turned alike."""


class Nvfp4Blocks(NamedTuple):
    """value = number · scale of its block · scale of all."""

    numbers: Tensor
    """What e2m1 can hold: ±0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    scales: Tensor
    """In e4m3, one for each block."""
    whole: Tensor
    """One for the whole tensor."""


def rounded(x: Tensor, *, square: bool = False, stochastic: bool = False) -> Tensor:
    """A matrix rounded to four bits and back: in blocks along the rows, or of 16 × 16, which are the same for the transpose."""
    tall, wide = x.shape
    padded = F.pad(x.float(), (0, -wide % BLOCK, 0, -tall % BLOCK if square else 0))
    numbers, scales, whole = quantise(padded, square=square, stochastic=stochastic)
    return (numbers * _spread(whole * scales.float(), square))[:tall, :wide]


def quantise(x: Tensor, *, square: bool = False, stochastic: bool = False) -> Nvfp4Blocks:
    """Of a float32 matrix whose rows (and, for square blocks, columns) are whole blocks."""
    blocks = x.abs().view(len(x), -1, BLOCK).amax(2)
    if square:
        blocks = blocks.view(-1, BLOCK, blocks.shape[1]).amax(1)
    largest = blocks.max() if blocks.numel() else blocks.new_zeros(())
    whole = torch.where(largest > 0, largest / (_LARGEST_SCALE * _LARGEST), 1.0)
    scales = (blocks / _LARGEST / whole).clamp(_SMALLEST_SCALE, _LARGEST_SCALE).to(torch.float8_e4m3fn)
    inverse = (1.0 / whole) / scales.float()
    return Nvfp4Blocks(_on_grid((x * _spread(inverse, square)).clamp(-_LARGEST, _LARGEST), stochastic), scales, whole)


def _spread(blocks: Tensor, square: bool) -> Tensor:
    """A number for each block becomes one for each element."""
    wide = blocks.repeat_interleave(BLOCK, 1)
    return wide.repeat_interleave(BLOCK, 0) if square else wide


def _on_grid(x: Tensor, stochastic: bool) -> Tensor:
    """The nearest number of e2m1, of two equally near ones the even; or one of the two beside it, by chance, so that the mean is right."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / step
    steps = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
    return torch.copysign(steps * step, x)


def turned(x: Tensor) -> Tensor:
    """Each 16 rows mixed by one orthogonal matrix, so that no outlier stands alone; rows of zeros are added to whole blocks.

    turned(x).T @ turned(y) is x.T @ y.
    """
    padded = F.pad(x.float(), (0, 0, 0, -len(x) % BLOCK))
    mixed: Tensor = torch.matmul(_hadamard().to(x.device), padded.view(-1, BLOCK, padded.shape[1]))
    return mixed.flatten(0, 1)


@cache
def _hadamard() -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([1.0 - 2.0 * (_SIGNS >> i & 1) for i in range(BLOCK)])
    return matrix * signs / math.sqrt(BLOCK)
