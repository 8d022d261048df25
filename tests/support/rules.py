"""Aggregation rules and mixings on a stack of contributions [N, D], by the settings that choose them."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config.schema.updates import Aggregation, Bucketing, Bulyan, GeometricMedian, Krum, MultiKrum, NearestNeighbours, NoMixing
from shoal.updates.rules.aggregation import combine
from shoal.updates.rules.mixing import Contributions


def combined(rule: Aggregation, stack_ND: Tensor) -> Tensor:
    return combine(rule, NoMixing(), stack_ND, torch.ones(len(stack_ND)), None, 0)[0]


def krum(stack_ND: Tensor, byzantine: int) -> Tensor:
    return combined(Krum(byzantine=byzantine), stack_ND)


def multi_krum(stack_ND: Tensor, byzantine: int, select: int | None = None) -> Tensor:
    return combined(MultiKrum(byzantine=byzantine, select=select), stack_ND)


def bulyan(stack_ND: Tensor, byzantine: int) -> Tensor:
    return combined(Bulyan(byzantine=byzantine), stack_ND)


def geometric_median(stack_ND: Tensor, iterations: int = 100) -> Tensor:
    return combined(GeometricMedian(iterations=iterations), stack_ND)


def bucketing(stack_ND: Tensor, size: int, seed: int) -> Tensor:
    return Contributions(stack_ND, Bucketing(size=size), seed).rows


def nearest_neighbour_mixing(stack_ND: Tensor, byzantine: int) -> Tensor:
    return Contributions(stack_ND, NearestNeighbours(byzantine=byzantine), 0).rows
