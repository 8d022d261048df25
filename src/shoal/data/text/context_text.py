"""What samples of text carry beside their tokens: the documents that they are of, and a text to read beside them.

Shapes: N samples, B of a batch, C tokens of a context.
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
"""Stands where a context has no more tokens."""


class Origins(NamedTuple):
    """The documents of each sample, which follow each other."""

    names: list[str]
    spans_N2: torch.Tensor
    """The first and the last document of each sample."""

    def of(self, number: int) -> list[str]:
        first, last = self.spans_N2[number].tolist()
        return self.names[first : last + 1]

    def select(self, indices: torch.Tensor) -> Origins:
        return Origins(self.names, self.spans_N2[indices])


def packed_origins(lengths: Sequence[int], names: Sequence[str], count: int, length: int) -> Origins:
    """The documents of `count` windows of `length` tokens (and a label more) over documents of these lengths in a row."""
    ends = np.cumsum(lengths)
    firsts = np.searchsorted(ends, np.arange(count) * length, side="right")
    lasts = np.searchsorted(ends, np.minimum(np.arange(1, count + 1) * length, ends[-1] - 1), side="right")
    return Origins(list(names), torch.from_numpy(np.stack([firsts, lasts], axis=1)))


def joined_origins(parts: Sequence[Origins]) -> Origins:
    before = np.cumsum([0] + [len(part.names) for part in parts]).tolist()
    spans = [part.spans_N2 + offset for part, offset in zip(parts, before, strict=False)]
    return Origins([name for part in parts for name in part.names], torch.cat(spans))


class DocumentSamples(Samples):
    """Samples of text that know which documents they are of."""

    origins: Origins
    sides: tuple[str, ...] = ("",)
    """Prefixes of the batch columns of each text of a sample; a pair of answers has two texts."""


class Contexts(NamedTuple):
    """A text to read beside each sample, where it has one: a stretch of one long row of tokens."""

    ids: torch.Tensor
    starts_N: torch.Tensor
    lengths_N: torch.Tensor

    def batch(self, index_B: torch.Tensor) -> torch.Tensor:
        """The contexts [B, 1, C] of these samples, filled up with NOTHING. At least one token wide, also where none has a context."""
        lengths_B = self.lengths_N[index_B]
        column_BC = torch.arange(max(1, int(lengths_B.max()))).expand(len(index_B), -1)
        place_BC = (self.starts_N[index_B, None] + column_BC).clamp_(0, max(0, len(self.ids) - 1))
        return self.ids[place_BC].long().masked_fill_(column_BC >= lengths_B[:, None], NO_TOKEN).unsqueeze(1)

    def select(self, indices: torch.Tensor) -> Contexts:
        return Contexts(self.ids, self.starts_N[indices], self.lengths_N[indices])


def contexts_of(samples: Sequence[Sample], longest: int) -> Contexts | None:
    """The contexts of samples, cut to a length; None if none of them has one."""
    if all(sample.context is None for sample in samples):
        return None
    none: NDArray[np.int32] = np.full(1, NO_TOKEN, np.int32)
    rows = [none[:0] if sample.context is None else sample.context[:longest] for sample in samples]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Contexts(torch.from_numpy(np.concatenate([*rows, none])), lengths.cumsum(0) - lengths, lengths)


def joined_contexts(parts: Sequence[Contexts | None], counts: Sequence[int]) -> Contexts | None:
    """The contexts of several parts in a row, of which some have none. `counts`: how many samples each part has."""
    if all(part is None for part in parts):
        return None
    none = torch.full((1,), NO_TOKEN, dtype=torch.int32)
    empty = [Contexts(none, torch.zeros(count).long(), torch.zeros(count).long()) for count in counts]
    known = [part or nothing for part, nothing in zip(parts, empty, strict=True)]
    before = np.cumsum([0] + [len(part.ids) for part in known]).tolist()
    starts = [part.starts_N + offset for part, offset in zip(known, before, strict=False)]
    return Contexts(torch.cat([part.ids for part in known]), torch.cat(starts), torch.cat([part.lengths_N for part in known]))
