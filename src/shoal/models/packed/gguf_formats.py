"""The formats of matrices in GGUF files: blocks of 32 or 256 numbers with their scales, as llama.cpp writes them.

Those with 4 bits (Q4_0, Q4_1, Q4_K) have a scale and an offset for every 32 numbers, which int4 has, too: codes stay as they are, and
scales are rounded from fp16 to bf16. Formats that torch has no product for (Q5_0, Q5_1, Q6_K, Q8_0) become int8.

Shapes: N rows, G groups of 32 numbers of a row, K blocks of 256 numbers of a row, D numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.models.packed.formats import GROUP

Int4 = tuple[Tensor, Tensor, Tensor]
"""Codes [N, G, 32] from 0 to 15, scales [N, G], and offsets [N, G]: number = code · scale + offset."""


class GgufFormat(NamedTuple):
    """A format, by its number in the file."""

    name: str
    block: int
    """Numbers of a block."""
    nbytes: int
    kind: str | None
    """The packed kind of Shoal that holds it; None: float32."""
    repacked: bool
    """Whether that kind has other codes."""

    def row_bytes(self, columns: int) -> int:
        return columns // self.block * self.nbytes


FORMATS: Mapping[int, GgufFormat] = {
    0: GgufFormat("F32", 1, 4, None, False),
    1: GgufFormat("F16", 1, 2, "fp16", False),
    2: GgufFormat("Q4_0", 32, 18, "int4", False),
    3: GgufFormat("Q4_1", 32, 20, "int4", False),
    6: GgufFormat("Q5_0", 32, 22, "int8", True),
    7: GgufFormat("Q5_1", 32, 24, "int8", True),
    8: GgufFormat("Q8_0", 32, 34, "int8", True),
    12: GgufFormat("Q4_K", 256, 144, "int4", False),
    14: GgufFormat("Q6_K", 256, 210, "int8", True),
    30: GgufFormat("BF16", 1, 2, "bf16", False),
}


def floats(raw: Tensor, kind: GgufFormat) -> Tensor:
    """Rows [N, bytes] of a file as float32 [N, D]."""
    if kind.name in _PLAIN:
        return raw.contiguous().view(_PLAIN[kind.name]).float()
    blocks = raw.view(len(raw), -1, kind.nbytes)
    if kind.kind == "int4":
        codes_NG32, scale_NG, offset_NG = _INT4[kind.name](blocks)
        return torch.addcmul(offset_NG[..., None], codes_NG32.float(), scale_NG[..., None]).flatten(1)
    return _OTHERS[kind.name](blocks).flatten(1)


def int4_rows(raw: Tensor, kind: GgufFormat) -> tuple[Tensor, Tensor]:
    """Rows of a format with 4 bits as int4 has them: see `formats.codes_and_scales`."""
    codes_NG32, scale_NG, offset_NG = _INT4[kind.name](raw.view(len(raw), -1, kind.nbytes))
    codes = codes_NG32.flatten(1)
    scales_NG2 = torch.stack([scale_NG, offset_NG + 8 * scale_NG], -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales_NG2.transpose(0, 1).to(torch.bfloat16)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 number at a byte of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: Tensor) -> Tensor:
    """First the low halves of all bytes, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _q4_0(blocks: Tensor) -> Int4:
    scale_NG = _half(blocks, 0)
    return _nibbles(blocks[..., 2:]), scale_NG, -8 * scale_NG


def _q4_1(blocks: Tensor) -> Int4:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Tensor) -> Int4:
    """Eight groups, whose scales and offsets are whole numbers of 6 bits, times two numbers of the block."""
    small = blocks[..., 4:16]
    low, high = small[..., :4], small[..., 4:8]
    scales = torch.cat([low & 63, small[..., 8:] & 15 | low >> 6 << 4], -1)
    offsets = torch.cat([high & 63, small[..., 8:] >> 4 | high >> 6 << 4], -1)
    codes = blocks[..., 16:].view(*blocks.shape[:2], 4, GROUP)
    codes_NK832 = torch.stack([codes & 15, codes >> 4], -2)
    scale, offset = _half(blocks, 0)[..., None] * scales, -_half(blocks, 2)[..., None] * offsets
    return codes_NK832.view(len(blocks), -1, GROUP), scale.flatten(1), offset.flatten(1)


def _q5(blocks: Tensor, start: int) -> Tensor:
    """Codes of 5 bits: the fifth are a word of 32 bits."""
    fifth = blocks[..., start : start + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (_nibbles(blocks[..., start + 4 :]) | fifth.flatten(-2) << 4).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0)[..., None] * (_q5(blocks, 2) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0)[..., None] * _q5(blocks, 4) + _half(blocks, 2)[..., None]


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0)[..., None] * blocks[..., 2:].contiguous().view(torch.int8)


def _q6_k(blocks: Tensor) -> Tensor:
    """Two halves of 128 numbers: 64 bytes with low halves, 32 bytes with two bits for each, and 8 of the 16 scales."""
    low = blocks[..., :128].view(*blocks.shape[:2], 2, 2, 32)
    high = blocks[..., 128:192].view(*blocks.shape[:2], 2, 1, 32)
    four = torch.stack([low[..., 0, :] & 15, low[..., 1, :] & 15, low[..., 0, :] >> 4, low[..., 1, :] >> 4], -2)
    two = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    codes = (four | two << 4).float() - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)[..., None]
    return _half(blocks, 208)[..., None, None] * scales * codes.view(*blocks.shape[:2], 16, 16)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INT4: Mapping[str, Callable[[Tensor], Int4]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
_OTHERS: Mapping[str, Callable[[Tensor], Tensor]] = {"Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q6_K": _q6_k}
