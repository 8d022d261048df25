"""Mixtures of several sources of text by weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.interfaces import Batch, Indices
from shoal.data.splits import share_out
from shoal.data.text.context_text import DocumentSamples
from shoal.data.text.documents import TextPart
from shoal.data.text.samples import TextSamples, joined
from shoal.errors import ShoalError


def probabilities(parts: Sequence[TextPart], sizes: Sequence[int | None], temperature: float) -> NDArray[np.float64]:
    """The sampling probability of each part: its weight, or its size if any part has no weight, to the power 1/temperature."""
    weights = [part.weight for part in parts]
    if None in weights:
        unknown = [part.name for part, size in zip(parts, sizes, strict=True) if size is None]
        if unknown:
            raise ShoalError(f"data.source.parts: the size of {unknown[0]} is not known while streaming: give every part a weight")
        weights = [float(size or 0) for size in sizes]
    powers = np.asarray(weights, np.float64) ** (1 / temperature)
    return np.asarray(powers / powers.sum())


class _Joined(DocumentSamples):
    """Samples of several parts in one set; the numbers of each part follow those of the one before."""

    def __init__(self, parts: Sequence[TextSamples]) -> None:
        self._samples = joined(parts)
        self._sizes = [len(part) for part in parts]
        self.origins = self._samples.origins

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Indices) -> Batch:
        return self._samples.batch(indices)


class MixedText(_Joined):
    """Samples of several parts. An epoch has as many draws as there are samples, apportioned by probability.

    Each part is read repeatedly, each time in a new order, and an epoch continues where the last one stopped. Holds: the order depends only
    on the seed and the epoch, so it need not be saved.
    """

    def __init__(self, parts: Sequence[TextSamples], shares: NDArray[np.float64]) -> None:
        super().__init__(parts)
        filled = shares * (np.asarray(self._sizes) > 0)
        self.draws_of_part = share_out(len(self._samples), filled / filled.sum())

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        first = np.cumsum([0, *self._sizes])
        drawn = [
            first[part] + _passes(size, epoch * draws, draws, (seed, part))
            for part, (size, draws) in enumerate(zip(self._sizes, self.draws_of_part, strict=True))
        ]
        return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(np.concatenate(drawn)))


class ChainedText(_Joined):
    """Samples of several parts, one part after the other, each in a new order every epoch."""

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        first = np.cumsum([0, *self._sizes])
        orders = [first[part] + np.random.default_rng([seed, epoch, part]).permutation(size) for part, size in enumerate(self._sizes)]
        return torch.from_numpy(np.concatenate(orders))


def _passes(size: int, start: int, count: int, key: tuple[int, int]) -> NDArray[np.int64]:
    """Draws `start` to `start + count` of an endless series of passes over a part, each a permutation of its own."""
    if not count:
        return np.zeros(0, np.int64)
    first, last = start // size, (start + count - 1) // size
    passes = [np.random.default_rng([*key, number]).permutation(size) for number in range(first, last + 1)]
    return np.asarray(np.concatenate(passes)[start - first * size : start - first * size + count], np.int64)
