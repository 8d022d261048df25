"""Text as a stream: documents are tokenised while they are read, and never all in memory.

Every reader can resume after any sample. Its state is a position in the documents and how much of the document at that position was
consumed; what was read ahead is read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.data.interfaces import IGNORED, Batch, SampleStream, State, StreamReader
from shoal.data.text.context_text import contexts_of
from shoal.data.text.documents import Document, Documents, Position
from shoal.data.text.encoding import Encoding, Sample, Tokens, collate, cut, encode, full, join, to_sample
from shoal.data.text.packing import packed_rows
from shoal.data.text.samples import refuse_contexts

_GROUP = 64
_WINDOW = 64
"""Rows of tokens of which whole documents are packed together. Larger windows pad less and are read again in more time on resuming."""


class HeldOut(NamedTuple):
    """The held-out documents of a stream: of the first `below`, every `every`-th, beginning with number `first`."""

    every: int = 1
    first: int = 0
    below: int = 0

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number < self.below and number % self.every == self.first


NOTHING_HELD_OUT = HeldOut()


class DocumentPosition(NamedTuple):
    """A position between two documents: for `Documents.read`, and the numbers of the next document and the next training document."""

    position: Position = None
    number: int = 0
    learned: int = 0


@dataclass(eq=False)
class TextStream(SampleStream):
    """A stream of samples from documents, shuffled over a buffer."""

    documents: Documents
    encoding: Encoding
    shuffle_buffer: int = 10_000
    held_out: HeldOut = NOTHING_HELD_OUT
    max_samples: int | None = None

    def read(self, *, shard: tuple[int, int], seed: int, epoch: int, state: State | None = None) -> StreamReader:
        return ShuffledReader(self, shard, [seed, epoch], state)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        batch = collate(samples, self.encoding)
        contexts = contexts_of(samples, self.encoding.sequence_length)
        return batch if contexts is None else batch | {"context_ids": contexts.batch(torch.arange(len(samples)))}

    def in_order(self, shard: tuple[int, int], state: State | None = None) -> SampleReader:
        """Read without shuffling."""
        reader = PackedDocumentsReader if self.encoding.packs_documents else PackedReader if self.encoding.packed else DocumentReader
        return reader(self, shard, state)


class SampleReader(StreamReader):
    """Samples of one shard, in the order of the documents. Training document n belongs to shard n mod count."""

    def __init__(self, stream: TextStream, shard: tuple[int, int], state: State | None) -> None:
        self._encoding = stream.encoding
        self._shard = shard
        index, count = shard
        quota = stream.max_samples
        self._quota = None if quota is None else quota // count + (index < quota % count)
        self._taken = state["taken"] if state else 0
        self._used = state["used"] if state else 0
        self._position = DocumentPosition(*state["place"]) if state else DocumentPosition()
        self._groups = self._encoded(stream)
        self._queue: deque[tuple[DocumentPosition, Any]] = deque()

    def __next__(self) -> Sample:
        if self._quota is not None and self._taken >= self._quota:
            raise StopIteration
        sample = self._next()
        self._taken += 1
        return sample

    def state_dict(self) -> State:
        """The position of the first document that is not consumed completely, and how much of it was consumed."""
        position = self._queue[0][0] if self._queue else self._position
        return {"place": list(position), "used": self._used, "taken": self._taken}

    def _next(self) -> Sample:
        raise NotImplementedError

    def _ends(self, documents: Sequence[Document]) -> list[tuple[int, ...]]:
        raise NotImplementedError

    def _fill(self) -> bool:
        """Read more documents. False: there are none."""
        group = next(self._groups, None)
        if group is None:
            return False
        self._queue.extend(group)
        return True

    def _encoded(self, stream: TextStream) -> Iterator[list[tuple[DocumentPosition, Any]]]:
        """Documents in groups, which are tokenised faster. Advances the position to the end of each group."""
        documents = self._documents(stream)
        while group := list(islice(documents, _GROUP)):
            texts = [document for _, document, _ in group]
            if self._encoding.packed:
                refuse_contexts(texts)
            tokens = encode(texts, self._encoding, self._ends(texts))
            self._position = group[-1][2]
            yield [(before, self._prepare(one)) for (before, _, _), one in zip(group, tokens, strict=True)]
        self._position = self._last

    def _documents(self, stream: TextStream) -> Iterator[tuple[DocumentPosition, Document, DocumentPosition]]:
        """The documents of this shard, each with the positions before and after it."""
        index, count = self._shard
        before = self._last = self._position
        for document, position in stream.documents.read(before.position):
            held = before.number in stream.held_out
            after = self._last = DocumentPosition(position, before.number + 1, before.learned + (not held))
            if not held and before.learned % count == index:
                yield before, document, after
            before = after

    def _prepare(self, texts: list[Tokens]) -> Any:
        return join(texts)


class PackedReader(SampleReader):
    """Concatenated documents, cut to sequences. `used` counts tokens."""

    def _ends(self, documents: Sequence[Document]) -> list[tuple[int, ...]]:
        """A separator after each document; after a piece of a document only if another shard has the next piece."""
        separator = self._encoding.tokenizer.separator
        return [separator if document.complete or self._shard[1] > 1 else () for document in documents]

    def _next(self) -> Sample:
        length = self._encoding.sequence_length
        while True:
            while self._available() <= length:
                if not self._fill():
                    return self._last_sample()
            sample = to_sample(self._window(length + 1))
            self._advance(length)
            if (sample.labels != IGNORED).any():
                return sample

    def _available(self) -> int:
        return sum(len(tokens) for _, tokens in self._queue) - self._used

    def _window(self, length: int) -> Tokens:
        parts, start = [], self._used
        for _, tokens in self._queue:
            parts.append(tokens.slice(start, start + length))
            length -= len(parts[-1])
            start = 0
            if not length:
                break
        return join(parts)

    def _advance(self, count: int) -> None:
        self._used += count
        while self._queue and self._used >= len(self._queue[0][1]):
            self._used -= len(self._queue.popleft()[1])

    def _last_sample(self) -> Sample:
        """The remaining tokens, padded to a sequence."""
        left = self._available()
        sample = to_sample(self._window(left)) if left > 1 else None
        self._queue.clear()
        self._used = 0
        if sample is None or not (sample.labels != IGNORED).any():
            raise StopIteration
        return full(sample, self._encoding.sequence_length, self._encoding.tokenizer.pad_id)


class DocumentReader(SampleReader):
    """One or more samples per document. `used` counts samples."""

    def _ends(self, documents: Sequence[Document]) -> list[tuple[int, ...]]:
        end = self._encoding.tokenizer.eos_id
        return [() if end is None else (end,)] * len(documents)

    def _prepare(self, texts: list[Tokens]) -> list[Sample]:
        return [sample for text in texts for sample in cut(text, self._encoding.sequence_length, self._encoding.truncation)]

    def _next(self) -> Sample:
        while not self._queue or self._used >= len(self._queue[0][1]):
            if self._queue:
                self._used -= len(self._queue.popleft()[1])
            elif not self._fill():
                raise StopIteration
        self._used += 1
        return self._queue[0][1][self._used - 1]


class PackedDocumentsReader(DocumentReader):
    """Rows of whole documents. Each window of documents is packed by itself. `used` counts rows of the window."""

    _window: list[Sample] | None = None
    _start: DocumentPosition

    def state_dict(self) -> State:
        start = self._position if self._window is None else self._start
        return {"place": list(start), "used": self._used, "taken": self._taken}

    def _next(self) -> Sample:
        while self._window is None or self._used >= len(self._window):
            if self._window is not None:
                self._used, self._window = 0, None
            if not self._queue and not self._fill():
                raise StopIteration
            self._start = self._queue[0][0]
            self._window = self._read_window()
        self._used += 1
        return self._window[self._used - 1]

    def _read_window(self) -> list[Sample]:
        samples: list[Sample] = []
        missing = _WINDOW * self._encoding.sequence_length
        while missing > 0 and (self._queue or self._fill()):
            own: list[Sample] = self._queue.popleft()[1]
            samples += own
            missing -= sum(len(sample.inputs) for sample in own)
        return packed_rows(samples, self._encoding)


class ShuffledReader(StreamReader):
    """Samples shuffled in blocks of `shuffle_buffer`. The next block is read, sample by sample, while this one is consumed.

    Holds: the order of a block depends only on the seed, the epoch and its number; so a state is the position at which the block begins and
    the number of its samples that were consumed, however large the buffer.
    """

    def __init__(self, stream: TextStream, shard: tuple[int, int], key: Sequence[int], state: State | None) -> None:
        self._size = stream.shuffle_buffer
        self._key = key
        self._number = state["block"] if state else 0
        self._consumed = 0
        self._samples = stream.in_order(shard, state["start"] if state else None)
        self._start_of_ahead: State = {}
        self._begin([])
        for _ in range(state["gone"] if state else 0):
            next(self)

    def __next__(self) -> Sample:
        if self._consumed == len(self._block):
            if not self._ahead:
                raise StopIteration
            self._number += 1
            self._begin(self._ahead)
        self._ahead.extend(islice(self._samples, 1))
        self._consumed += 1
        return self._block[int(self._order[self._consumed - 1])]

    def state_dict(self) -> State:
        return {"block": self._number, "gone": self._consumed, "start": self._start}

    def _begin(self, ahead: list[Sample]) -> None:
        """Begin a block with the samples that were read ahead; without any, read a block."""
        self._start = self._start_of_ahead if ahead else self._samples.state_dict()
        self._block = ahead or list(islice(self._samples, self._size))
        self._ahead: list[Sample] = []
        self._start_of_ahead = self._samples.state_dict()
        self._order = np.random.default_rng([*self._key, self._number]).permutation(len(self._block))
        self._consumed = 0
