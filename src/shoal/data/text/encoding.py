"""Documents to tokens, and tokens to samples of a sequence length.

A token is `learned` unless it belongs to a prompt. A sample is a window of up to T + 1 tokens: all but the last are its inputs, all but
the first its labels. Windows follow each other with stride T, so that every token but the very first is a label exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from shoal.data.interfaces import IGNORED, Batch
from shoal.data.text.chat_template import ChatTemplate
from shoal.data.text.documents import Document
from shoal.data.text.tokenizers import Tokenizer
from shoal.data.text.tokenizers.interface import Ids, Learned
from shoal.data.text.turns import LearnedText, LearnFrom, learned_texts


class Tokens(NamedTuple):
    """Tokens, a mask of those that the model learns to write, and the documents that they are from."""

    ids: Ids
    learned: Learned
    origins: tuple[str, ...] = ()
    context: Ids | None = None
    """The tokens of the context."""

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> Tokens:
        return Tokens(self.ids[start:stop], self.learned[start:stop], self.origins, self.context)


class Sample(NamedTuple):
    """Inputs, and the label of each: the token that follows, or IGNORED."""

    inputs: Ids
    labels: Ids
    origins: tuple[str, ...] = ()
    """The documents that they are from."""
    context: Ids | None = None
    lengths: tuple[int, ...] = ()
    """Of a row of several whole documents: the tokens of each."""


class Encoding(NamedTuple):
    """How documents become samples."""

    tokenizer: Tokenizer
    sequence_length: int
    batching: Literal["packed", "dynamic", "padded"] = "packed"
    padding_side: Literal["right", "left"] = "right"
    truncation: bool = True
    packing: Literal["documents", "stream"] = "stream"
    template: ChatTemplate | None = None
    """Renders conversations; None: there are none, or the model has no template."""
    learn_from: LearnFrom = "assistant"

    @property
    def packed(self) -> bool:
        return self.batching == "packed"

    @property
    def packs_documents(self) -> bool:
        """Whether rows hold several whole documents."""
        return self.packed and self.packing == "documents"


def encode(documents: Sequence[Document], encoding: Encoding, end: Sequence[Sequence[int]]) -> list[list[Tokens]]:
    """The tokens of each document: prompt and text as one text, and its `end`. A conversation may give several texts, which end as its
    template ends them. Before a text is what the tokenizer puts there."""
    texts = learned_texts(documents, encoding.template, encoding.learn_from)
    flat = iter(encoding.tokenizer.encode_learned([(text.text, text.spans) for some in texts for text in some]))
    contexts = _encode_non_empty([document.context for document in documents], encoding.tokenizer)
    opening = encoding.tokenizer.opening
    encoded = []
    for document, some, tail in zip(documents, texts, end, strict=True):
        context = next(contexts) if document.context else None
        before = () if document.continues else opening
        own = [_tokens(text, *next(flat), before, tail) for text in some]
        encoded.append([Tokens(one.ids, one.learned, (document.origin,), context) for one in own])
    return encoded


def _tokens(text: LearnedText, ids: Ids, learned: Learned, opening: Sequence[int], end: Sequence[int]) -> Tokens:
    """The tokens of a text that is no conversation begin and end as the tokenizer says."""
    if text.is_chat or not (opening or end):
        return Tokens(ids, learned)
    first = np.full(len(opening), bool(learned[:1].all()), np.bool_)  # as what follows it
    learned = np.concatenate([first, learned, np.ones(len(end), np.bool_)])
    return Tokens(np.concatenate([np.asarray(opening, np.int32), ids, np.asarray(end, np.int32)]), learned)


def _encode_non_empty(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[Ids]:
    non_empty = [text for text in texts if text]
    return iter(tokenizer.encode_batch(non_empty) if non_empty else [])


def join(tokens: Sequence[Tokens]) -> Tokens:
    origins = tuple(dict.fromkeys(origin for part in tokens for origin in part.origins))
    return Tokens(np.concatenate([part.ids for part in tokens]), np.concatenate([part.learned for part in tokens]), origins)


def to_sample(window: Tokens) -> Sample:
    labels = np.where(window.learned[1:], window.ids[1:], np.int32(IGNORED))
    return Sample(window.ids[:-1], labels, window.origins, window.context)


def cut(document: Tokens, length: int, truncation: bool) -> Iterator[Sample]:
    """The samples of one document that is not packed: one, or without truncation several. Windows without a label are skipped."""
    for start in range(0, max(1, len(document) - 1), length):
        window = document.slice(start, start + length + 1)
        if len(window) > 1 and window.learned[1:].any():
            yield to_sample(window)
        if truncation:
            return


def full(sample: Sample, length: int, pad: int) -> Sample:
    """A sample padded on the right to a length."""
    missing = length - len(sample.inputs)
    if not missing:
        return sample
    inputs = np.concatenate([sample.inputs, np.full(missing, pad, np.int32)])
    return sample._replace(inputs=inputs, labels=np.concatenate([sample.labels, np.full(missing, IGNORED, np.int32)]))


def collate(samples: Sequence[Sample], encoding: Encoding) -> Batch:
    """Samples of a stream as a batch."""
    if encoding.packed:
        batch = {
            "input_ids": torch.from_numpy(np.stack([sample.inputs for sample in samples])).long(),
            "labels": torch.from_numpy(np.stack([sample.labels for sample in samples])).long(),
        }
        return batch | {"document_lengths": document_lengths(samples)} if encoding.packs_documents else batch
    lengths = torch.tensor([len(sample.inputs) for sample in samples])
    starts = lengths.cumsum(0) - lengths
    inputs = torch.from_numpy(np.concatenate([sample.inputs for sample in samples]))
    labels = torch.from_numpy(np.concatenate([sample.labels for sample in samples]))
    return gather(inputs, labels, starts, lengths, encoding)


def document_lengths(rows: Sequence[Sample]) -> torch.Tensor:
    """The lengths of each row's documents [rows, M], filled up with 0. M is a power of two: batches have few different shapes, and what
    is compiled or recorded for one shape is used again."""
    most = max((len(row.lengths) for row in rows), default=1)
    lengths = torch.zeros(len(rows), 1 << (most - 1).bit_length(), dtype=torch.int64)
    for row, own in enumerate(rows):
        lengths[row, : len(own.lengths)] = torch.tensor(own.lengths)
    return lengths


def gather(inputs: torch.Tensor, labels: torch.Tensor, starts_B: torch.Tensor, lengths_B: torch.Tensor, encoding: Encoding) -> Batch:
    """Rows of flat tensors, padded to the longest row or to the sequence length, on the side of `encoding.padding_side`."""
    width = encoding.sequence_length if encoding.batching == "padded" else int(lengths_B.max())
    column_BT = torch.arange(width).expand(len(starts_B), width)
    if encoding.padding_side == "left":
        column_BT = column_BT - (width - lengths_B)[:, None]
    mask_BT = (column_BT >= 0) & (column_BT < lengths_B[:, None])
    at_BT = (starts_B[:, None] + column_BT).clamp_(0, len(inputs) - 1)
    return {
        "input_ids": inputs[at_BT].long().masked_fill_(~mask_BT, encoding.tokenizer.pad_id),
        "labels": labels[at_BT].long().masked_fill_(~mask_BT, IGNORED),
        "attention_mask": mask_BT,
    }
