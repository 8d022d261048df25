"""Mixing before aggregation: each row of the stack [N, D] becomes a mean of several, so that heterogeneous honest rows look more alike.

A mixing is a matrix [R, N] whose rows sum to one. Rules that need distances only never compute the mixed vectors.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from shoal.config.derived_values import default_byzantine
from shoal.config.schema.updates import Bucketing, Mixing, NearestNeighbours
from shoal.updates.rules.gram_matrix import gram, squared_distances, weighted_sum


def bucketing_matrix(count: int, size: int, seed: int) -> Tensor:
    """Random buckets of `size` contributions (Karimireddy et al., 2022), of which the last may hold fewer: [r, n] is the share of
    contribution n in the mean of bucket r; 0 where n is in another."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    member_RN = torch.zeros(-(-count // size), count, dtype=torch.float64)
    member_RN[torch.arange(count) // size, order] = 1
    return member_RN / member_RN.sum(1, keepdim=True)


def neighbour_matrix(gram_NN: Tensor, byzantine: int) -> Tensor:
    """Means of neighbours (Allouah et al., 2023): [i, j] is 1 / (N − f) where j is one of the N − f nearest to i (one is i), else 0."""
    count = len(gram_NN)
    kept = max(1, count - byzantine)
    nearest = squared_distances(gram_NN).argsort(dim=1, stable=True)[:, :kept]
    return torch.zeros(count, count, dtype=torch.float64).scatter_(1, nearest, 1 / kept)


class Contributions:
    """The mixed rows that a rule sees. They are computed only if the rule needs more than their inner products."""

    def __init__(self, stack_ND: Tensor, mixing: Mixing, seed: int, weights_N: Tensor | None = None, memory: Tensor | None = None) -> None:
        self.stack_ND = stack_ND
        self.weights_N = torch.ones(len(stack_ND)) if weights_N is None else weights_N
        """Samples of each contribution. Only the plain mean uses them: in robust rules a claim of many samples must not count."""
        self.memory = memory
        """State of the rule from the last round; None at first. What the rule stores here is saved with the run."""
        self.dropped: list[int] = []
        """Rows of the stack that the rule left out of its result."""
        self.bucket = mixing.size if isinstance(mixing, Bucketing) else 1
        self.mixing_RN = self._matrix(mixing, seed)

    def _matrix(self, mixing: Mixing, seed: int) -> Tensor | None:
        count = len(self.stack_ND)
        if isinstance(mixing, Bucketing):
            return bucketing_matrix(count, mixing.size, seed)
        if isinstance(mixing, NearestNeighbours):
            byzantine = default_byzantine(mixing.kind, count) if mixing.byzantine is None else mixing.byzantine
            return neighbour_matrix(self._raw_gram, byzantine)
        return None

    @cached_property
    def _raw_gram(self) -> Tensor:
        return gram(self.stack_ND)

    @cached_property
    def gram(self) -> Tensor:
        return self._raw_gram if self.mixing_RN is None else self.mixing_RN @ self._raw_gram @ self.mixing_RN.T

    @cached_property
    def rows(self) -> Tensor:
        return self.stack_ND if self.mixing_RN is None else self.mixing_RN.to(self.stack_ND) @ self.stack_ND

    def weighted(self, weights_R: Tensor) -> Tensor:
        weights_N = weights_R if self.mixing_RN is None else weights_R @ self.mixing_RN
        self.drop_unused(weights_N)
        return weighted_sum(weights_N, self.stack_ND)

    def choose(self, rows: list[int]) -> None:
        """Declare that the result uses these rows only."""
        chosen_R = torch.zeros(len(self.gram), dtype=torch.float64).index_fill_(0, torch.tensor(rows), 1.0)
        self.drop_unused(chosen_R if self.mixing_RN is None else chosen_R @ self.mixing_RN)

    def drop_unused(self, weights_N: Tensor) -> None:
        self.dropped = (weights_N == 0).nonzero()[:, 0].tolist()

    def mean(self, weights_N: Tensor) -> Tensor:
        own = weights_N.double().cpu() if self.mixing_RN is None else self.mixing_RN @ weights_N.double().cpu()
        return self.weighted(own / own.sum())
