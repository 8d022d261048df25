"""The Gram matrix of a stack [N, D], from which all distances between rows, and between means of rows, follow without another pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_WIDTH = 8192
"""Columns of one product: few enough for float32 sums, which are then added up in float64."""
_AT_ONCE = 128
_LANES = 16
_CLOSE = 0.05
"""Pairs nearer than this share of their norms lose too much of their distance to cancellation."""
_LARGEST = 1e13
"""Sums of squares of numbers up to this do not overflow float32."""


def gram(stack_ND: Tensor) -> Tensor:
    """Inner products of all rows in double precision, relative to one origin for all: zero, or one of the rows.

    Contributions that have much in common are measured relative to one of them: the one of median norm, since an attacker's might be so
    long that all others look alike from it.
    """
    scales_N1 = None
    products = _products(stack_ND, None, None)
    if not products.isfinite().all():
        scales_N1 = _scales(stack_ND)
        products = _products(stack_ND, None, scales_N1)
    lengths = products.diagonal()
    near = squared_distances(products) < _CLOSE * (lengths[:, None] + lengths[None, :])
    if near.fill_diagonal_(False).any():
        origin = int(lengths.argsort()[len(lengths) // 2])
        products = _products(stack_ND, stack_ND[origin], scales_N1)
    return products


def squared_distances(gram_NN: Tensor) -> Tensor:
    """Squared distances of all pairs. Holds: exactly symmetric, so that rounding decides between no two contributions."""
    lengths = gram_NN.diagonal()
    return (lengths[:, None] + lengths[None, :] - (gram_NN + gram_NN.T)).clamp(min=0).fill_diagonal_(0)


def weighted_sum(weights_N: Tensor, stack_ND: Tensor) -> Tensor:
    """The weighted sum of the rows; a copy where only one row counts."""
    used = weights_N.nonzero().flatten()
    if len(used) == 1 and weights_N[used] == 1:
        return stack_ND[int(used)].clone()
    return weights_N.to(stack_ND) @ stack_ND


def _products(stack_ND: Tensor, origin_D: Tensor | None, scales_N1: Tensor | None) -> Tensor:
    count, size = stack_ND.shape
    total_NN = torch.zeros(count, count, dtype=torch.float64)
    columns = _WIDTH * (_AT_ONCE if origin_D is None and scales_N1 is None else 8)
    for start in range(0, size, columns):
        part = stack_ND[:, start : start + columns].float()
        if origin_D is not None:
            part = part - origin_D[start : start + columns].float()
        if scales_N1 is not None:
            part = part * scales_N1
        total_NN += _product(part).cpu()
    return total_NN if scales_N1 is None else total_NN / (scales_N1 @ scales_N1.T).cpu()


def _product(part_NC: Tensor) -> Tensor:
    """Products of narrow blocks, which parallelise far better than one product of two wide flat matrices."""
    count, size = part_NC.shape
    if part_NC.device.type == "cpu" and not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return _product_with_numpy(part_NC)
    whole = size // _WIDTH * _WIDTH
    rest_NC = part_NC[:, whole:].double()
    total_NN = rest_NC @ rest_NC.T
    if whole:
        blocks_BNW = part_NC[:, :whole].view(count, -1, _WIDTH).transpose(0, 1)
        total_NN += _symmetric(blocks_BNW)
    return total_NN


def _product_with_numpy(part_NC: Tensor) -> Tensor:
    """NumPy computes only half of a symmetric product. On ARM, where torch has no MKL, that takes half of torch's time."""
    array = part_NC.numpy()
    total_NN = np.zeros((len(array), len(array)))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, array.shape[1], _WIDTH):
            block_NW = array[:, start : start + _WIDTH]
            block_NW = block_NW if block_NW.shape[1] == _WIDTH else block_NW.astype(np.float64)
            total_NN += block_NW @ block_NW.T
    return torch.from_numpy(total_NN)


def _symmetric(blocks_BNW: Tensor) -> Tensor:
    """The sum of all blocks' products with themselves. Only the corner beyond a whole number of vector registers is computed in full."""
    even = (blocks_BNW.shape[1] - 1) // _LANES * _LANES
    left_BEW, right_BRW = blocks_BNW[:, :even], blocks_BNW[:, even:]
    corner_RR = torch.bmm(right_BRW, right_BRW.transpose(1, 2)).sum(0, dtype=torch.float64)
    if not even:
        return corner_RR
    columns_NE = torch.bmm(blocks_BNW, left_BEW.transpose(1, 2)).sum(0, dtype=torch.float64)
    return torch.cat([columns_NE, torch.cat([columns_NE[even:].T, corner_RR])], dim=1)


def _scales(stack_ND: Tensor) -> Tensor:
    """Factors that scale the longest rows so that their squares do not overflow float32; 1 for the others."""
    peaks_N1 = stack_ND.abs().amax(1, keepdim=True).double()
    return (_LARGEST / peaks_N1).clamp(max=1)
