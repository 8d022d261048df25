"""Rotary position embeddings: each pair of numbers of a query or key is rotated by an angle that grows with its position.

Shapes: B batch, L tokens, N heads, S positions, E head size, P pairs in a head; the last 2 are cosine and sine, or the two of a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from shoal.models.kernels import HAS_TRITON

THETA = 10_000.0


class Rotary(nn.Module):
    """Table of cosines and sines for all positions, for adjacent pairs (2i, 2i+1)."""

    turns_SP2: Tensor

    def __init__(self, max_seq_len: int, head_size: int, frequencies_P: Tensor | None = None) -> None:
        """`frequencies_P`: rotation of each pair per position, in radians; None: the usual ones."""
        super().__init__()
        self.max_seq_len, self.head_size = max_seq_len, head_size
        # A copy is no buffer, whatever was given: a conversion of the model to bfloat16 must not round it
        self.frequencies_P = None if frequencies_P is None else frequencies_P.detach().clone()
        self._fill(torch.get_default_device(), torch.float32)

    def forward(self, start: int, length: int) -> Tensor:
        return self.turns_SP2[start : start + length]

    def _fill(self, device: torch.device, dtype: torch.dtype) -> None:
        # On the CPU, because not every device has float64
        pairs = torch.arange(0, self.head_size, 2, dtype=torch.float64, device="cpu")
        frequencies_P = THETA ** (-pairs / self.head_size) if self.frequencies_P is None else self.frequencies_P.to("cpu", torch.float64)
        positions = torch.arange(self.max_seq_len, dtype=torch.float64, device="cpu")
        angles_SP = torch.outer(positions, frequencies_P)
        turns_SP2 = torch.stack([angles_SP.cos(), angles_SP.sin()], dim=-1)
        self.register_buffer("turns_SP2", turns_SP2.to(device, dtype), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A conversion to bfloat16 would round the table, and `to_empty` would lose it: recompute it in full precision
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill(self.turns_SP2.device, torch.float64 if self.turns_SP2.dtype == torch.float64 else torch.float32)
        return self


def rotate(x_BLNE: Tensor, turns_LP2: Tensor) -> Tensor:
    """(a, b) → (a·cos − b·sin, b·cos + a·sin) for each pair. The table is shared by all rows, or [B, L, P, 2]."""
    pairs_BLNP2 = x_BLNE.view(*x_BLNE.shape[:-1], -1, 2)
    if _has_complex(x_BLNE) and x_BLNE.dtype == turns_LP2.dtype:
        turned = torch.view_as_complex(pairs_BLNP2) * torch.view_as_complex(turns_LP2).unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2)
    first, second = pairs_BLNP2.unbind(-1)
    cos, sin = turns_LP2.unsqueeze(-3).unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2).to(x_BLNE.dtype)


def to_adjacent_pairs(rows: Tensor, head_size: int) -> Tensor:
    """Reorder rows of queries or keys from rotary pairs (i, i + half), as in transformers, to pairs (2i, 2i + 1), as here."""
    return rows.view(-1, 2, head_size // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def to_half_pairs(rows: Tensor, head_size: int) -> Tensor:
    """The inverse of `to_adjacent_pairs`."""
    return rows.view(-1, head_size // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def turns_in_one_pass(all_BLNE: Tensor, turns_LP2: Tensor) -> bool:
    """Whether `kernels/rotary` splits and rotates these heads: on a GPU in half precision."""
    size = all_BLNE.shape[-1]
    half = all_BLNE.is_cuda and all_BLNE.dtype in (torch.bfloat16, torch.float16) and turns_LP2.dtype == torch.float32
    return HAS_TRITON and half and size & (size - 1) == 0


def _has_complex(x: Tensor) -> bool:
    """Complex products read memory once, which is several times faster; but compilers do not fuse them, and half precision has none."""
    return not torch.compiler.is_compiling() and x.dtype in (torch.float32, torch.float64) and x.device.type in ("cpu", "cuda")
