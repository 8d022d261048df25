"""Packed matrices: the bytes of a matrix in 16, 8 or 4 bits, as they lie in memory, in files and on the wire.

fp16, bf16: the numbers. int8: one code per number, then one scale per row in bf16. int4: two codes a byte, the first in the low half, then
for each group of 32 numbers of a row a scale and an offset in bf16, groups before rows: number = (code - 8) · scale + offset.

Shapes: N rows (outputs), D columns (inputs), G groups of a row, X bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share a scale and an offset in int4."""
KINDS = ("fp16", "bf16", "int8", "int4")
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_AT_A_TIME = 1 << 18
"""Numbers that are packed or unpacked at a time, so that what lies between stays small."""
_STEPS = (15.5, 14.5, 13.5)
"""Steps from the least to the largest number of a group that are tried, each also with a scale and an offset fitted to its codes. Of
normal numbers the squared error is 13 % less than with 15 steps, and takes 0.02 s for a million of them."""


class PackedShape(NamedTuple):
    """Kind and size of a packed matrix."""

    kind: str
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        if self.kind in HALF:
            return 2 * self.numbers
        if self.kind == "int8":
            return self.numbers + 2 * self.rows
        return self.numbers // 2 + self.numbers // GROUP * 4

    @property
    def numbers(self) -> int:
        return self.rows * self.columns


def kind_for(kind: str, columns: int) -> str:
    """int8 instead of int4 where the columns do not divide into groups."""
    return "int8" if kind == "int4" and columns % GROUP else kind


def packed(weight_ND: Tensor, kind: str) -> Tensor:
    """The bytes [X] of a matrix."""
    if kind in HALF:
        return weight_ND.to(HALF[kind]).contiguous().view(torch.uint8).flatten()
    return joined([packed_rows(weight_ND[rows], kind) for rows in row_blocks(*weight_ND.shape)])


def packed_rows(weight_ND: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Some rows of a matrix in the form of `codes_and_scales`."""
    if kind in HALF:
        return weight_ND.to(HALF[kind]), None
    return (_int8 if kind == "int8" else _int4)(weight_ND.float())


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """The bytes [X] of a matrix, from its rows in the form of `codes_and_scales`."""
    scales = [scales for _, scales in parts if scales is not None]
    tensors = [torch.cat([codes for codes, _ in parts]), *([torch.cat(scales, -2)] if scales else [])]
    return torch.cat([one.contiguous().view(torch.uint8).flatten() for one in tensors])


def unpacked(raw_X: Tensor, shape: PackedShape) -> Iterator[Tensor]:
    """The matrix in float32, some rows at a time."""
    codes, scales = codes_and_scales(raw_X, shape)
    for rows in row_blocks(shape.rows, shape.columns):
        yield unpacked_rows(codes[rows], scales[..., rows, :] if scales is not None else None)


def unpacked_rows(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Rows of a matrix in float32, from their part of `codes_and_scales`."""
    if scales is None:
        return codes.float()
    if codes.dtype == torch.int8:
        return codes * scales.float()
    codes_NG32 = torch.stack([codes & 15, codes >> 4], dim=-1).view(len(codes), -1, GROUP)
    scales_NG2 = scales.float().transpose(0, 1)
    return torch.addcmul(scales_NG2[..., 1:], codes_NG32.float() - 8, scales_NG2[..., :1]).flatten(1)


def codes_and_scales(raw_X: Tensor, shape: PackedShape) -> tuple[Tensor, Tensor | None]:
    """Views of the bytes. fp16 and bf16: the matrix [N, D]. int8: codes [N, D], scales [N, 1]. int4: bytes [N, D / 2], scales and offsets
    [G, N, 2]."""
    kind, rows, columns = shape
    if kind in HALF:
        return raw_X.view(HALF[kind]).view(rows, columns), None
    if kind == "int8":
        return raw_X[: shape.numbers].view(torch.int8).view(rows, columns), raw_X[shape.numbers :].view(torch.bfloat16).view(rows, 1)
    half = shape.numbers // 2
    return raw_X[:half].view(rows, columns // 2), raw_X[half:].view(torch.bfloat16).view(columns // GROUP, rows, 2)


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _AT_A_TIME // columns)
    yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _int8(weight_ND: Tensor) -> tuple[Tensor, Tensor]:
    scales_N1 = _nonzero(weight_ND.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    return (weight_ND / scales_N1.float()).round().clamp(-127, 127).to(torch.int8), scales_N1


class _Coded(NamedTuple):
    """Codes from -8 to 7, the scale and the offset as bf16 gives them, and the squared error of each group."""

    codes_NG32: Tensor
    scale_NG1: Tensor
    offset_NG1: Tensor
    error_NG1: Tensor


def _int4(weight_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, scales and offsets: of several scales for each group the one with the least squared error."""
    groups_NG32 = weight_ND.view(len(weight_ND), -1, GROUP)
    least_NG1, most_NG1 = groups_NG32.amin(-1, keepdim=True), groups_NG32.amax(-1, keepdim=True)
    best = None
    for steps in _STEPS:
        scale_NG1 = (most_NG1 - least_NG1) / steps
        found = _coded(groups_NG32, scale_NG1, (least_NG1 + most_NG1 + scale_NG1) / 2)
        best = found if best is None else _better(best, found)
        best = _better(best, _coded(groups_NG32, *_fitted(groups_NG32, found.codes_NG32)))
    assert best is not None
    codes_NG32, scale_NG1, offset_NG1, _ = best
    nibbles = (codes_NG32 + 8).to(torch.uint8).flatten(1)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, torch.cat([scale_NG1, offset_NG1], -1).transpose(0, 1).to(torch.bfloat16)


def _better(one: _Coded, other: _Coded) -> _Coded:
    """Of each group the one with the smaller error."""
    chosen_NG1 = other.error_NG1 < one.error_NG1
    return _Coded(*(torch.where(chosen_NG1, new, old) for new, old in zip(other, one, strict=True)))


def _coded(groups_NG32: Tensor, scale_NG1: Tensor, offset_NG1: Tensor) -> _Coded:
    scale_NG1, offset_NG1 = (_nonzero(scale_NG1).to(torch.bfloat16).float(), offset_NG1.to(torch.bfloat16).float())
    codes_NG32 = ((groups_NG32 - offset_NG1) / scale_NG1).round().clamp(-8, 7)
    error_NG1 = torch.addcmul(offset_NG1, codes_NG32, scale_NG1).sub_(groups_NG32).square_().sum(-1, keepdim=True)
    return _Coded(codes_NG32, scale_NG1, offset_NG1, error_NG1)


def _fitted(groups_NG32: Tensor, codes_NG32: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the offset that give the numbers best, for these codes."""
    codes_mean, mean = codes_NG32.mean(-1, keepdim=True), groups_NG32.mean(-1, keepdim=True)
    spread_NG32 = codes_NG32 - codes_mean
    scale_NG1 = (spread_NG32 * groups_NG32).sum(-1, keepdim=True) / _nonzero(spread_NG32.square().sum(-1, keepdim=True))
    return scale_NG1, mean - scale_NG1 * codes_mean


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)
