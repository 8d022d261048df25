"""Samples and streams of text with the passages that are retrieved for their chunks.

Shapes: N samples, B of a batch, S texts of a sample, U chunks with later tokens, K passages per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.data.interfaces import Batch, Indices, Samples, SampleStream, State, StreamReader, as_index
from shoal.data.retrieval.finder import PassageFinder, texts_of
from shoal.data.text.context_text import DocumentSamples


class RetrievalSamples(Samples):
    """Samples in memory. The passages of a sample are retrieved when it is first loaded, and kept in memory shared by loader processes:
    training starts before all are retrieved, and no epoch retrieves them again. Each side of a pair of answers has its own passages."""

    def __init__(self, inner: Samples, finder: PassageFinder, longest: int) -> None:
        assert isinstance(inner, DocumentSamples)
        self.inner, self.finder = inner, finder
        self._sides = inner.sides
        chunks = max(1, (longest - 1) // finder.settings.chunk_size)
        self._neighbours_NSUK = torch.full((len(inner), len(self._sides), chunks, finder.settings.top_k), -1, dtype=torch.int32)
        self._known_N = torch.zeros(len(inner), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.inner)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        return self.inner.order(seed, epoch)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        batch = self.inner.batch(index)
        unknown = torch.unique(index[~self._known_N[index]])
        if len(unknown):
            self._find(unknown)
        for side, found_BUK in zip(self._sides, self._neighbours_NSUK[index].unbind(1), strict=True):
            columns = _side_of(batch, side)
            columns = self.finder.columns(found_BUK, texts_of(columns)[1], columns["input_ids"].shape[1])
            batch |= {f"{side}{name}": value for name, value in columns.items()}
        return batch

    def _find(self, numbers: torch.Tensor) -> None:
        batch, origins = self.inner.batch(numbers), [self.inner.origins.of(int(number)) for number in numbers]
        for at, side in enumerate(self._sides):
            found = self.finder.neighbours(texts_of(_side_of(batch, side))[0], origins, self._neighbours_NSUK.shape[2])
            self._neighbours_NSUK[numbers, at] = torch.from_numpy(found)
        self._known_N[numbers] = True  # last, since other processes read this mask


def _side_of(batch: Batch, side: str) -> Batch:
    return {name.removeprefix(side): value for name, value in batch.items() if name.startswith(side)}


class RetrievalStream(SampleStream):
    """A stream whose passages are retrieved when a batch is made."""

    def __init__(self, inner: SampleStream, finder: PassageFinder) -> None:
        self.inner, self.finder = inner, finder

    def read(self, *, shard: tuple[int, int], seed: int, epoch: int, state: State | None = None) -> StreamReader:
        return self.inner.read(shard=shard, seed=seed, epoch=epoch, state=state)

    def collate(self, samples: Sequence[Any]) -> Batch:
        batch = self.inner.collate(samples)
        return batch | self.finder.batch_columns(batch, [sample.origins for sample in samples])
