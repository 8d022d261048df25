"""Text as samples in memory: sequences of one length in one tensor, or documents of their own length.

Shapes: N samples, B of a batch, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from shoal.data.interfaces import IGNORED, Batch, Indices, as_index
from shoal.data.text.documents import Document
from shoal.data.text.encoding import Encoding, Tokens, cut, encode, full, gather, join, to_sample
from shoal.errors import ShoalError

_LONG_TOKENS = 32 * 2**20


class PackedText:
    """Sequences of T tokens. A batch is one index_select for inputs and one for labels."""

    def __init__(self, inputs_NT: torch.Tensor, labels_NT: torch.Tensor) -> None:
        self.inputs_NT = inputs_NT
        self.labels_NT = labels_NT

    def __len__(self) -> int:
        return len(self.inputs_NT)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        # .long() does nothing where the tokens are int64 already.
        return {
            "input_ids": self.inputs_NT.index_select(0, index).long(),
            "labels": self.labels_NT.index_select(0, index).long(),
        }

    def select(self, indices: torch.Tensor) -> Self:
        return type(self)(self.inputs_NT[indices], self.labels_NT[indices])


class PaddedText:
    """Samples of their own length, padded when a batch is made."""

    def __init__(
        self, inputs: torch.Tensor, labels: torch.Tensor, starts_N: torch.Tensor, lengths_N: torch.Tensor, encoding: Encoding
    ) -> None:
        self.inputs, self.labels = inputs, labels
        self.starts_N, self.lengths_N = starts_N, lengths_N
        self._encoding = encoding

    def __len__(self) -> int:
        return len(self.lengths_N)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        starts_B, lengths_B = self.starts_N.index_select(0, index), self.lengths_N.index_select(0, index)
        return gather(self.inputs, self.labels, starts_B, lengths_B, self._encoding)

    def select(self, indices: torch.Tensor) -> Self:
        return type(self)(self.inputs, self.labels, self.starts_N[indices], self.lengths_N[indices], self._encoding)


TextSamples = PackedText | PaddedText


def text_samples(documents: Sequence[Document], encoding: Encoding) -> TextSamples:
    """Tokenise documents and make samples of them. There may be none."""
    return _pack(documents, encoding) if encoding.packed else _pad(documents, encoding)


def _pack(documents: Sequence[Document], encoding: Encoding) -> PackedText:
    """All documents in a row, a separator between them, cut to length; the last sequence is filled up."""
    separator = encoding.tokenizer.separator
    ends = [separator] * (len(documents) - 1) + [()]
    tokens = join(encode(documents, encoding.tokenizer, ends)) if documents else _nothing()
    length = encoding.sequence_length
    count = max(0, -(-(len(tokens) - 1) // length))
    if not count:
        empty = torch.zeros(0, length, dtype=torch.int64)
        return PackedText(empty, empty)
    sample = full(to_sample(tokens), count * length, encoding.tokenizer.pad_id)
    labels = _tensor(sample.labels).view(count, length)
    inputs = _tensor(sample.inputs).view(count, length)
    useful = (labels != IGNORED).any(1)  # a sequence in the middle of a long prompt has nothing to learn
    return PackedText(inputs, labels) if bool(useful.all()) else PackedText(inputs[useful], labels[useful])


def _pad(documents: Sequence[Document], encoding: Encoding) -> PaddedText:
    end = () if encoding.tokenizer.eos_id is None else (encoding.tokenizer.eos_id,)
    encoded = encode(documents, encoding.tokenizer, [end] * len(documents))
    samples = [sample for tokens in encoded for sample in cut(tokens, encoding.sequence_length, encoding.truncation)]
    lengths = torch.tensor([len(sample.inputs) for sample in samples], dtype=torch.int64)
    inputs = np.concatenate([sample.inputs for sample in samples]) if samples else np.zeros(0, np.int32)
    labels = np.concatenate([sample.labels for sample in samples]) if samples else np.zeros(0, np.int32)
    return PaddedText(_tensor(inputs), _tensor(labels), lengths.cumsum(0) - lengths, lengths, encoding)


def _nothing() -> Tokens:
    return Tokens(np.zeros(0, np.int32), np.zeros(0, np.bool_))


def _tensor(ids: np.typing.NDArray[np.int32]) -> torch.Tensor:
    """Token ids as int64, which models want; as int32 if there are so many that the memory matters."""
    tensor = torch.from_numpy(ids)
    return tensor.long() if len(ids) <= _LONG_TOKENS else tensor


def joined(parts: Sequence[TextSamples]) -> TextSamples:
    """Samples of several parts in one set of tensors, in order."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], PackedText):
        packed = [part for part in parts if isinstance(part, PackedText)]
        return PackedText(torch.cat([part.inputs_NT for part in packed]), torch.cat([part.labels_NT for part in packed]))
    padded = [part for part in parts if isinstance(part, PaddedText)]
    before = np.cumsum([0] + [len(part.inputs) for part in padded]).tolist()
    return PaddedText(
        torch.cat([part.inputs for part in padded]),
        torch.cat([part.labels for part in padded]),
        torch.cat([part.starts_N + offset for part, offset in zip(padded, before, strict=False)]),
        torch.cat([part.lengths_N for part in padded]),
        parts[0]._encoding,
    )


def enough(name: str, samples: TextSamples, encoding: Encoding) -> None:
    """Refuse text that does not fill a single sequence."""
    if encoding.packed and len(samples) <= 1:
        tokens = int((samples.labels_NT != IGNORED).sum()) + 1 if isinstance(samples, PackedText) and len(samples) else 0
        if tokens <= encoding.sequence_length:
            raise ShoalError(
                f"{name}: the text to learn from has {tokens} tokens, and one sequence takes {encoding.sequence_length} and the one that "
                "follows: take more text, or set data.sequence_length lower, or data.batching to dynamic"
            )
    if not len(samples):
        raise ShoalError(f"{name}: there is no text to learn from")
