"""Documents to tokens, and tokens to samples of a sequence length.

A token is `learned` unless it belongs to a prompt. A sample is a window of up to T + 1 tokens: all but the last are its inputs, all but
the first its labels. Windows follow each other with stride T, so that every token but the very first is a label exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.interfaces import IGNORED, Batch
from shoal.data.text.documents import Document
from shoal.data.text.tokenizers import Tokenizer

Ids = NDArray[np.int32]
Learned = NDArray[np.bool_]


class Tokens(NamedTuple):
    """Tokens, which of them the model learns to write, and the documents that they are of."""

    ids: Ids
    learned: Learned
    origins: tuple[str, ...] = ()
    context: Ids | None = None
    """The tokens of a text to read beside them."""

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> Tokens:
        return Tokens(self.ids[start:stop], self.learned[start:stop], self.origins, self.context)


class Sample(NamedTuple):
    """Inputs, and the label of each: the token that follows, or IGNORED."""

    inputs: Ids
    labels: Ids
    origins: tuple[str, ...] = ()
    """The documents that they are of."""
    context: Ids | None = None


class Encoding(NamedTuple):
    """How documents become samples."""

    tokenizer: Tokenizer
    sequence_length: int
    batching: Literal["packed", "dynamic", "padded"] = "packed"
    padding_side: Literal["right", "left"] = "right"
    truncation: bool = True

    @property
    def packed(self) -> bool:
        return self.batching == "packed"


def encode(documents: Sequence[Document], tokenizer: Tokenizer, end: Sequence[Sequence[int]]) -> list[Tokens]:
    """The tokens of each document: prompt, text, and what `end` gives for it."""
    texts = tokenizer.encode_batch([document.text for document in documents])
    prompted = [document.prompt for document in documents if document.prompt]
    prompts = iter(tokenizer.encode_batch(prompted) if prompted else [])
    beside = [document.context for document in documents if document.context]
    contexts = iter(tokenizer.encode_batch(beside) if beside else [])
    encoded = []
    for document, text, tail in zip(documents, texts, end, strict=True):
        prompt = next(prompts) if document.prompt else text[:0]
        learned = np.ones(len(prompt) + len(text) + len(tail), np.bool_)
        learned[: len(prompt)] = False
        ids = np.concatenate([prompt, text, np.asarray(tail, np.int32)])
        encoded.append(Tokens(ids, learned, (document.origin,), next(contexts) if document.context else None))
    return encoded


def join(tokens: Sequence[Tokens]) -> Tokens:
    origins = tuple(dict.fromkeys(origin for part in tokens for origin in part.origins))
    return Tokens(np.concatenate([part.ids for part in tokens]), np.concatenate([part.learned for part in tokens]), origins)


def to_sample(window: Tokens) -> Sample:
    labels = np.where(window.learned[1:], window.ids[1:], np.int32(IGNORED))
    return Sample(window.ids[:-1], labels, window.origins, window.context)


def cut(document: Tokens, length: int, truncation: bool) -> Iterator[Sample]:
    """The samples of one document that is not packed: one, or with no truncation as many as it takes. None without a label."""
    for start in range(0, max(1, len(document) - 1), length):
        window = document.slice(start, start + length + 1)
        if len(window) > 1 and window.learned[1:].any():
            yield to_sample(window)
        if truncation:
            return


def full(sample: Sample, length: int, pad: int) -> Sample:
    """A sample filled up to a length at its end."""
    missing = length - len(sample.inputs)
    if not missing:
        return sample
    inputs = np.concatenate([sample.inputs, np.full(missing, pad, np.int32)])
    return sample._replace(inputs=inputs, labels=np.concatenate([sample.labels, np.full(missing, IGNORED, np.int32)]))


def collate(samples: Sequence[Sample], encoding: Encoding) -> Batch:
    """Samples of a stream as a batch."""
    if encoding.packed:
        return {
            "input_ids": torch.from_numpy(np.stack([sample.inputs for sample in samples])).long(),
            "labels": torch.from_numpy(np.stack([sample.labels for sample in samples])).long(),
        }
    lengths = torch.tensor([len(sample.inputs) for sample in samples])
    starts = lengths.cumsum(0) - lengths
    inputs = torch.from_numpy(np.concatenate([sample.inputs for sample in samples]))
    labels = torch.from_numpy(np.concatenate([sample.labels for sample in samples]))
    return gather(inputs, labels, starts, lengths, encoding)


def gather(inputs: torch.Tensor, labels: torch.Tensor, starts_B: torch.Tensor, lengths_B: torch.Tensor, encoding: Encoding) -> Batch:
    """Rows of flat tensors, padded to the longest or to the sequence length, on the side that is wanted."""
    width = encoding.sequence_length if encoding.batching == "padded" else int(lengths_B.max())
    column_BT = torch.arange(width).expand(len(starts_B), width)
    if encoding.padding_side == "left":
        column_BT = column_BT - (width - lengths_B)[:, None]
    mask_BT = (column_BT >= 0) & (column_BT < lengths_B[:, None])
    place_BT = (starts_B[:, None] + column_BT).clamp_(0, len(inputs) - 1)
    return {
        "input_ids": inputs[place_BT].long().masked_fill_(~mask_BT, encoding.tokenizer.pad_id),
        "labels": labels[place_BT].long().masked_fill_(~mask_BT, IGNORED),
        "attention_mask": mask_BT,
    }
