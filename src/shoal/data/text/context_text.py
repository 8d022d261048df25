"""Additional columns of text samples: the documents that they are from, and contexts for cross-attention.

Shapes: N samples, B batch, C tokens of a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.interfaces import Samples
from shoal.data.text.encoding import Sample

NO_TOKEN = -1
"""Padding of contexts and passages."""


class Origins(NamedTuple):
    """The documents of each sample: a range."""

    names: list[str]
    spans_N2: torch.Tensor
    """The first and the last document of each sample."""

    def of(self, number: int) -> list[str]:
        first, last = self.spans_N2[number].tolist()
        return self.names[first : last + 1]

    def select(self, indices: torch.Tensor) -> Origins:
        return Origins(self.names, self.spans_N2[indices])


def packed_origins(lengths: Sequence[int], names: Sequence[str], count: int, length: int) -> Origins:
    """The documents of `count` windows of `length` tokens and one label, over the concatenation of documents of these lengths."""
    ends = np.cumsum(lengths)
    firsts = np.searchsorted(ends, np.arange(count) * length, side="right")
    lasts = np.searchsorted(ends, np.minimum(np.arange(1, count + 1) * length, ends[-1] - 1), side="right")
    return Origins(list(names), torch.from_numpy(np.stack([firsts, lasts], axis=1)))


def joined_origins(parts: Sequence[Origins]) -> Origins:
    before = np.cumsum([0] + [len(part.names) for part in parts]).tolist()
    spans = [part.spans_N2 + offset for part, offset in zip(parts, before, strict=False)]
    return Origins([name for part in parts for name in part.names], torch.cat(spans))


class DocumentSamples(Samples):
    """Samples of text with the documents that they are from."""

    origins: Origins
    sides: tuple[str, ...] = ("",)
    """Prefixes of the batch columns of each text of a sample; a pair of answers has two texts."""


class Contexts(NamedTuple):
    """The context of each sample, which may be empty: a range of one long row of tokens."""

    ids: torch.Tensor
    starts_N: torch.Tensor
    lengths_N: torch.Tensor

    def batch(self, index_B: torch.Tensor) -> torch.Tensor:
        """The contexts [B, 1, C] of these samples, padded with NO_TOKEN. Holds: C ≥ 1, even if all contexts are empty."""
        lengths_B = self.lengths_N[index_B]
        column_BC = torch.arange(max(1, int(lengths_B.max()))).expand(len(index_B), -1)
        at_BC = (self.starts_N[index_B, None] + column_BC).clamp_(0, max(0, len(self.ids) - 1))
        return self.ids[at_BC].long().masked_fill_(column_BC >= lengths_B[:, None], NO_TOKEN).unsqueeze(1)

    def select(self, indices: torch.Tensor) -> Contexts:
        return Contexts(self.ids, self.starts_N[indices], self.lengths_N[indices])


def contexts_of(samples: Sequence[Sample], longest: int) -> Contexts | None:
    """The contexts of samples, cut to `longest` tokens; None if all are empty."""
    if all(sample.context is None for sample in samples):
        return None
    none: NDArray[np.int32] = np.full(1, NO_TOKEN, np.int32)
    rows = [none[:0] if sample.context is None else sample.context[:longest] for sample in samples]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Contexts(torch.from_numpy(np.concatenate([*rows, none])), lengths.cumsum(0) - lengths, lengths)


def joined_contexts(parts: Sequence[Contexts | None], counts: Sequence[int]) -> Contexts | None:
    """The concatenated contexts of several parts, some of which may have none. `counts`: number of samples of each part."""
    if all(part is None for part in parts):
        return None
    none = torch.full((1,), NO_TOKEN, dtype=torch.int32)
    empty = [Contexts(none, torch.zeros(count).long(), torch.zeros(count).long()) for count in counts]
    known = [part or no_context for part, no_context in zip(parts, empty, strict=True)]
    before = np.cumsum([0] + [len(part.ids) for part in known]).tolist()
    starts = [part.starts_N + offset for part, offset in zip(known, before, strict=False)]
    return Contexts(torch.cat([part.ids for part in known]), torch.cat(starts), torch.cat([part.lengths_N for part in known]))
