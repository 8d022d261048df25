"""Norm clipping of contributions."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from shoal.updates.parallel_blocks import Floats, in_blocks

_EXACT = 1e-25, 1e30
"""A float32 sum of squares between these has neither overflowed nor lost much to underflow."""


def norm(vector: Tensor) -> float:
    """The L2 norm. Holds: it is not finite exactly when one of the numbers is not, so one pass checks both."""
    values: Floats = vector.detach().numpy()
    sums: list[float] = []
    in_blocks(len(values), lambda start, end: sums.append(_sum_of_squares(values[start:end])))
    return math.sqrt(math.fsum(sums)) if all(map(math.isfinite, sums)) else math.nan


def clip_(vector: Tensor, limit: float) -> float:
    """Scale the vector to the norm `limit` if it is longer, in place. Return the norm before; if that is not finite nothing changes."""
    before = norm(vector)
    if math.isfinite(before) and before > limit:
        values: Floats = vector.detach().numpy()
        in_blocks(len(values), lambda start, end: _scale(values[start:end], limit / before))
    return before


def _scale(block: Floats, factor: float) -> None:
    if factor < np.finfo(np.float32).tiny:
        block[:] = block * np.float64(factor)
    else:
        block *= np.float32(factor)


def _sum_of_squares(block: Floats) -> float:
    """Without BLAS: after a product its threads spin for 50 ms on the cores that torch computes on."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.einsum("i,i->", block, block))
        if not _EXACT[0] < total < _EXACT[1]:
            exact = block.astype(np.float64)
            total = float(np.einsum("i,i->", exact, exact))
    return total
