"""Samples and streams of text with the passages that their chunks find.

Shapes: N samples, B of a batch, U chunks that are read by later ones, K passages of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shoal.data.interfaces import Batch, Indices, Reader, Samples, State, Stream, as_index
from shoal.data.retrieval.finder import Finder, texts_of
from shoal.data.supply import shuffled
from shoal.data.text.beside import Origins


class Known(Samples, Protocol):
    """Samples that know their documents."""

    @property
    def origins(self) -> Origins: ...


class ReadingSamples:
    """Samples in memory. A sample's passages are found when it is first asked for, and remembered, by all processes that load ahead:
    a long text need not wait until all of them are found, and no epoch finds them again."""

    def __init__(self, inner: Known, finder: Finder, longest: int) -> None:
        self.inner, self.finder = inner, finder
        chunks = max(1, (longest - 1) // finder.reading.chunk_size)
        self._neighbours_NUK = torch.full((len(inner), chunks, finder.reading.top_k), -1, dtype=torch.int32)
        self._known_N = torch.zeros(len(inner), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.inner)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        return shuffled(self.inner, seed, epoch)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        batch = self.inner.batch(index)
        unknown = torch.unique(index[~self._known_N[index]])
        if len(unknown):
            self._find(unknown)
        _, starts_B = texts_of(batch)
        return batch | self.finder.columns(self._neighbours_NUK[index], starts_B, batch["input_ids"].shape[1])

    def _find(self, numbers: torch.Tensor) -> None:
        texts, _ = texts_of(self.inner.batch(numbers))
        own = [self.inner.origins.of(int(number)) for number in numbers]
        found = self.finder.neighbours(texts, own, self._neighbours_NUK.shape[1])
        self._neighbours_NUK[numbers] = torch.from_numpy(found)
        self._known_N[numbers] = True  # last: another process may look meanwhile


class ReadingStream:
    """A stream whose passages are found while its batches are put together."""

    def __init__(self, inner: Stream, finder: Finder) -> None:
        self.inner, self.finder = inner, finder

    def read(self, *, shard: tuple[int, int], seed: int, epoch: int, state: State | None = None) -> Reader:
        return self.inner.read(shard=shard, seed=seed, epoch=epoch, state=state)

    def collate(self, samples: Sequence[Any]) -> Batch:
        batch = self.inner.collate(samples)
        return batch | self.finder.read_beside(batch, [sample.origins for sample in samples])
