"""Text samples in memory: packed sequences in one tensor, or documents of different lengths.

Shapes: N samples, B batch, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch.nn import functional as F

from shoal.data.interfaces import IGNORED, Batch, Indices, SelectableSamples, as_index
from shoal.data.text.context_text import Contexts, DocumentSamples, Origins, contexts_of, joined_contexts, joined_origins, packed_origins
from shoal.data.text.documents import Document
from shoal.data.text.encoding import Encoding, Sample, cut, document_lengths, encode, full, gather, join, to_sample
from shoal.data.text.packing import packed_rows
from shoal.errors import ShoalError

_LONG_TOKENS = 32 * 2**20


@dataclass(eq=False)
class PackedText(DocumentSamples, SelectableSamples):
    """Sequences of T tokens. A batch is one index_select for inputs and one for labels."""

    inputs_NT: torch.Tensor
    labels_NT: torch.Tensor
    origins: Origins
    documents_NM: torch.Tensor | None = None
    """Tokens of each document of a sequence of whole documents, filled up with 0; None: sequences are cut from all texts joined."""

    def __len__(self) -> int:
        return len(self.inputs_NT)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        # .long() does nothing where the tokens are int64 already.
        batch = {
            "input_ids": self.inputs_NT.index_select(0, index).long(),
            "labels": self.labels_NT.index_select(0, index).long(),
        }
        return batch if self.documents_NM is None else batch | {"document_lengths": self.documents_NM.index_select(0, index)}

    def select(self, indices: torch.Tensor) -> Self:
        documents = None if self.documents_NM is None else self.documents_NM[indices]
        return type(self)(self.inputs_NT[indices], self.labels_NT[indices], self.origins.select(indices), documents)


@dataclass(eq=False)
class PaddedText(DocumentSamples, SelectableSamples):
    """Samples of different lengths, padded when a batch is made."""

    inputs: torch.Tensor
    labels: torch.Tensor
    starts_N: torch.Tensor
    lengths_N: torch.Tensor
    encoding: Encoding
    origins: Origins
    contexts: Contexts | None

    def __len__(self) -> int:
        return len(self.lengths_N)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        starts_B, lengths_B = self.starts_N.index_select(0, index), self.lengths_N.index_select(0, index)
        batch = gather(self.inputs, self.labels, starts_B, lengths_B, self.encoding)
        return batch if self.contexts is None else batch | {"context_ids": self.contexts.batch(index)}

    def select(self, indices: torch.Tensor) -> Self:
        starts, lengths, origins = self.starts_N[indices], self.lengths_N[indices], self.origins.select(indices)
        contexts = self.contexts.select(indices) if self.contexts else None
        return type(self)(self.inputs, self.labels, starts, lengths, self.encoding, origins, contexts)


TextSamples = PackedText | PaddedText


@dataclass
class Truncated:
    """How many texts are longer than a sequence and lose their end."""

    count: int = 0
    unlearned: int = 0
    """Of these: all that is to be learned was in the end, so they are left out."""

    def note(self) -> str:
        """For the user; empty: all texts are whole."""
        if not self.count:
            return ""
        unlearned = f", {self.unlearned:,} of them all that is to be learned" if self.unlearned else ""
        return f"; {self.count:,} texts are longer than data.sequence_length and lose their end{unlearned}"


def text_samples(documents: Sequence[Document], encoding: Encoding, truncated: Truncated | None = None) -> TextSamples:
    """Tokenise documents and make samples of them. There may be none. `truncated` counts the texts that are longer than a sequence."""
    if encoding.packs_documents:
        return _pack_documents(documents, encoding, truncated)
    return _pack(documents, encoding) if encoding.packed else _pad(documents, encoding, truncated)


def _pack(documents: Sequence[Document], encoding: Encoding) -> PackedText:
    """The documents concatenated with separators and cut to length; the last sequence is padded."""
    separator = encoding.tokenizer.separator
    ends = [separator] * (len(documents) - 1) + [()]
    refuse_contexts(documents)
    encoded = [join(texts) for texts in encode(documents, encoding, ends)] if documents else []
    length = encoding.sequence_length
    count = -(-(sum(map(len, encoded)) - 1) // length)
    if count <= 0:
        empty = torch.zeros(0, length, dtype=torch.int64)
        return PackedText(empty, empty, Origins([], torch.zeros(0, 2, dtype=torch.int64)))
    sample = full(to_sample(join(encoded)), count * length, encoding.tokenizer.pad_id)
    labels = _tensor(sample.labels).view(count, length)
    inputs = _tensor(sample.inputs).view(count, length)
    useful = (labels != IGNORED).any(1)  # a sequence inside a long prompt has no labels
    origins = packed_origins([len(one) for one in encoded], [document.origin for document in documents], count, length)
    packed = PackedText(inputs, labels, origins)
    return packed if bool(useful.all()) else packed.select(useful)


def _pack_documents(documents: Sequence[Document], encoding: Encoding, truncated: Truncated | None) -> PackedText:
    """Sequences of whole documents, each sequence padded at its end."""
    refuse_contexts(documents)
    rows = packed_rows([sample for some in _cut_each(documents, encoding, truncated) for sample in some], encoding)
    names = [origin for row in rows for origin in row.origins]
    ends = torch.tensor([len(row.lengths) for row in rows], dtype=torch.int64).cumsum(0)
    spans = torch.stack([ends - torch.tensor([len(row.lengths) for row in rows], dtype=torch.int64), ends - 1], dim=1)
    none: np.typing.NDArray[np.int32] = np.zeros(0, np.int32)
    inputs, labels = (_tensor(np.concatenate([none, *tokens])) for tokens in ([row.inputs for row in rows], [row.labels for row in rows]))
    shape = len(rows), encoding.sequence_length
    return PackedText(inputs.view(shape), labels.view(shape), Origins(names, spans), document_lengths(rows))


def refuse_contexts(documents: Sequence[Document]) -> None:
    """Raises ShoalError if documents have contexts: a packed sequence may hold several documents, each with its own context."""
    if any(document.context for document in documents):
        raise ShoalError(
            "data.batching: cross-attention reads one text's context at a time, and packed sequences hold several texts: "
            "set it to dynamic or padded"
        )


def _pad(documents: Sequence[Document], encoding: Encoding, truncated: Truncated | None) -> PaddedText:
    cuts = _cut_each(documents, encoding, truncated)
    samples = [sample for some in cuts for sample in some]
    numbers = torch.tensor([number for number, some in enumerate(cuts) for _ in some], dtype=torch.int64)
    origins = Origins([document.origin for document in documents], torch.stack([numbers, numbers], dim=1))
    lengths = torch.tensor([len(sample.inputs) for sample in samples], dtype=torch.int64)
    inputs = np.concatenate([sample.inputs for sample in samples]) if samples else np.zeros(0, np.int32)
    labels = np.concatenate([sample.labels for sample in samples]) if samples else np.zeros(0, np.int32)
    contexts = contexts_of(samples, encoding.sequence_length)
    return PaddedText(_tensor(inputs), _tensor(labels), lengths.cumsum(0) - lengths, lengths, encoding, origins, contexts)


def _cut_each(documents: Sequence[Document], encoding: Encoding, truncated: Truncated | None) -> list[list[Sample]]:
    """The samples of each document by itself, its end-of-text token included."""
    end = () if encoding.tokenizer.eos_id is None else (encoding.tokenizer.eos_id,)
    samples_of: list[list[Sample]] = []
    for texts in encode(documents, encoding, [end] * len(documents)):
        parts = [[*cut(text, encoding.sequence_length, encoding.truncation)] for text in texts]
        samples_of.append([sample for part in parts for sample in part])
        if truncated is not None and encoding.truncation:
            longer = [bool(part) for text, part in zip(texts, parts, strict=True) if len(text) - 1 > encoding.sequence_length]
            truncated.count += len(longer)
            truncated.unlearned += len(longer) - sum(longer)
    return samples_of


def _tensor(ids: np.typing.NDArray[np.int32]) -> torch.Tensor:
    """Token ids as int64, which models need; as int32 above `_LONG_TOKENS`, to save memory."""
    tensor = torch.from_numpy(ids)
    return tensor.long() if len(ids) <= _LONG_TOKENS else tensor


def joined(parts: Sequence[TextSamples]) -> TextSamples:
    """The concatenated samples of several parts."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], PackedText):
        packed = [part for part in parts if isinstance(part, PackedText)]
        origins = joined_origins([part.origins for part in packed])
        inputs, labels = torch.cat([part.inputs_NT for part in packed]), torch.cat([part.labels_NT for part in packed])
        return PackedText(inputs, labels, origins, _joined_lengths([part.documents_NM for part in packed]))
    padded = [part for part in parts if isinstance(part, PaddedText)]
    before = np.cumsum([0] + [len(part.inputs) for part in padded]).tolist()
    return PaddedText(
        torch.cat([part.inputs for part in padded]),
        torch.cat([part.labels for part in padded]),
        torch.cat([part.starts_N + offset for part, offset in zip(padded, before, strict=False)]),
        torch.cat([part.lengths_N for part in padded]),
        parts[0].encoding,
        joined_origins([part.origins for part in padded]),
        joined_contexts([part.contexts for part in padded], [len(part) for part in padded]),
    )


def _joined_lengths(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The document lengths of several parts, as wide as the widest."""
    known = [part for part in parts if part is not None]
    widest = max((part.shape[1] for part in known), default=0)
    return torch.cat([F.pad(part, (0, widest - part.shape[1])) for part in known]) if known else None


def padding_note(parts: Sequence[TextSamples]) -> str:
    """How many documents are in sequences of whole documents, and how much is padded; empty: there are no such sequences."""
    packed = [(part.inputs_NT, part.documents_NM) for part in parts if isinstance(part, PackedText) and part.documents_NM is not None]
    if not packed:
        return ""
    room = sum(inputs_NT.numel() for inputs_NT, _ in packed)
    tokens = sum(int(lengths_NM.sum()) for _, lengths_NM in packed)
    documents = sum(int((lengths_NM > 0).sum()) for _, lengths_NM in packed)
    return f" ({documents:,} texts, {1 - tokens / max(1, room):.1%} padding)"


def expect_one_sequence(name: str, samples: TextSamples, encoding: Encoding, truncated: Truncated) -> None:
    """Raises ShoalError if the text does not fill one sequence."""
    if encoding.packed and not encoding.packs_documents and len(samples) <= 1:
        tokens = int((samples.labels_NT != IGNORED).sum()) + 1 if isinstance(samples, PackedText) and len(samples) else 0
        if tokens <= encoding.sequence_length:
            raise ShoalError(
                f"{name}: the text to learn from has {tokens} tokens, and one sequence takes {encoding.sequence_length} and the one that "
                "follows: take more text, or set data.sequence_length lower, or data.batching to dynamic"
            )
    if not len(samples):
        raise ShoalError(f"{name}: there is no text to learn from{_why_none(encoding, truncated)}")


def _why_none(encoding: Encoding, truncated: Truncated) -> str:
    if truncated.unlearned:
        return (
            f": {truncated.unlearned:,} texts are longer than data.sequence_length ({encoding.sequence_length}), and all that is to be "
            "learned was in the end that they lose: set it higher"
        )
    if encoding.template is not None:
        return ": the rows are conversations without a turn of the assistant: add its answers, or set data.learn_from to all"
    return ""
