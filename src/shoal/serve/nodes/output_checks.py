"""What the server checks in the output of a machine.

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TOLERANCE = 0.05
"""Numbers of two machines may differ by this share of the token's largest number: in bfloat16 each layer adds up to a 256th."""
_AGREEING_SHARE = 0.75
"""Tokens that must agree. In a mixture of experts, rounding may send a token through other experts."""
_MOST_LARGER = 8.0
"""No number may be this many times larger than the token's largest number on the other machine."""


def output_problem(y_BLD: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Why a tensor cannot be the output of a stage; None: it can be."""
    if y_BLD.shape == shape and y_BLD.dtype == dtype:
        return None
    return f"its output has the shape {tuple(y_BLD.shape)} and the type {y_BLD.dtype} instead of {shape} and {dtype}"


def rows_not_finite(y_BLD: Tensor) -> list[int]:
    """The rows with a number that is not finite."""
    if y_BLD.sum(dtype=torch.promote_types(y_BLD.dtype, torch.float32)).isfinite():  # a twentieth of the time of the exact check
        return []
    finite = y_BLD.isfinite()
    return [row for row, is_finite in enumerate(finite.flatten(1).all(1).tolist()) if not is_finite]


def agrees(own_1LD: Tensor, other_1LD: Tensor) -> bool:
    """Whether another machine's output is this machine's, within the tolerance."""
    own_LD, other_LD = own_1LD[0].float().cpu(), other_1LD[0].float().cpu()
    if own_LD.shape != other_LD.shape or not (own_LD.isfinite().all() and other_LD.isfinite().all()):
        return False
    largest_L = own_LD.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    agreeing_L = (own_LD - other_LD).abs().amax(-1) <= _TOLERANCE * largest_L
    return bool(agreeing_L.float().mean() >= _AGREEING_SHARE and (other_LD.abs().amax(-1) <= _MOST_LARGER * largest_L).all())
