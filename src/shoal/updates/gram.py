"""The Gram matrix of a stack [N, D]: from it follow all distances, and those of any means of its rows, without another pass over it."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDTH = 4096
"""Columns of one product: short enough for sums of 32-bit floats, which are then added up in double precision."""
_AT_ONCE = 256
_CLOSE = 0.05
"""Pairs nearer than this share of their length: the subtraction would lose too much of their distance."""
_LONGEST = 1e15
"""The square of a vector longer than 1e19 is no 32-bit float; one of this length is far from all others just as well."""


def gram(stack_ND: Tensor) -> Tensor:
    """Inner products of all rows in double precision, relative to one origin for all: zero, or one of the rows.

    Contributions that have much in common are measured from one of them. That is the one of middle length: an attacker's might be so
    long that all others look alike from there.
    """
    products = _products(stack_ND, None)
    if not products.isfinite().all():
        stack_ND = _shortened(stack_ND)
        products = _products(stack_ND, None)
    lengths = products.diagonal()
    near = squared_distances(products) < _CLOSE * (lengths[:, None] + lengths[None, :])
    if near.fill_diagonal_(False).any():
        origin = int(lengths.argsort()[len(lengths) // 2])
        products = _products(stack_ND, stack_ND[origin])
    return products


def squared_distances(gram_NN: Tensor) -> Tensor:
    """Squared distances of all pairs."""
    lengths = gram_NN.diagonal()
    return (lengths[:, None] + lengths[None, :] - 2 * gram_NN).clamp(min=0).fill_diagonal_(0)


def weighted_sum(weights_N: Tensor, stack_ND: Tensor) -> Tensor:
    """The rows, each times its weight; a copy where it is one row alone."""
    used = weights_N.nonzero().flatten()
    if len(used) == 1 and weights_N[used] == 1:
        return stack_ND[int(used)].clone()
    return weights_N.to(stack_ND) @ stack_ND


def _products(stack_ND: Tensor, origin_D: Tensor | None) -> Tensor:
    count, size = stack_ND.shape
    total_NN = torch.zeros(count, count, dtype=torch.float64)
    columns = _WIDTH * _AT_ONCE if origin_D is None else _WIDTH * 8
    for start in range(0, size, columns):
        part = stack_ND[:, start : start + columns].float()
        if origin_D is not None:
            part = part - origin_D[start : start + columns].float()
        total_NN += _product(part).cpu()
    return total_NN


def _product(part_NC: Tensor) -> Tensor:
    """All cores take products of narrow blocks: they share the work far better than one product of two such flat matrices."""
    whole = part_NC.shape[1] // _WIDTH * _WIDTH
    rest_NC = part_NC[:, whole:]
    total_NN = (rest_NC @ rest_NC.T).double()
    if whole:
        blocks_BNW = part_NC[:, :whole].view(len(part_NC), -1, _WIDTH).transpose(0, 1)
        total_NN += torch.bmm(blocks_BNW, blocks_BNW.transpose(1, 2)).sum(0, dtype=torch.float64)
    return total_NN


def _shortened(stack_ND: Tensor) -> Tensor:
    """The same directions, none of them too long for its square to be a number."""
    peaks = stack_ND.abs().amax(1, keepdim=True)
    scaled = stack_ND / peaks.clamp(min=1)
    lengths = scaled.norm(dim=1, keepdim=True) * peaks.clamp(min=1).double()
    return torch.where(lengths > _LONGEST, scaled * (_LONGEST / scaled.norm(dim=1, keepdim=True)).float(), stack_ND)
