"""Text as a stream: parts, held-out documents, and the stream or the mixture of streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import torch

from shoal.config import Run
from shoal.data.interfaces import SampleStream
from shoal.data.loaded_data import Data
from shoal.data.splits import HELD_OUT_SHARE, share_out
from shoal.data.streams.mixed import MixedStream
from shoal.data.streams.text import NOTHING_HELD_OUT, HeldOut, TextStream
from shoal.data.text.documents import FEW, ChainedDocuments, Document, DocumentFronts, Documents, TextPart, cut
from shoal.data.text.encoding import Encoding
from shoal.data.text.load_text import LoadedText, expect_contexts
from shoal.data.text.mixture import probabilities
from shoal.data.text.run_tokenizer import CONVERSATIONS, contents, find_encoding, joined_name, noun, text_info
from shoal.data.text.samples import TextSamples, joined, text_samples
from shoal.errors import ShoalError

STREAM_HELD_OUT = 1000
"""Held-out samples of a stream, unless max_eval_samples is set: a stream may be endless."""

_BPE_DOCUMENTS = 2000
"""Documents of each part for the training of `bpe`."""


def load_stream(parts: Sequence[TextPart], run: Run, cache_dir: Path | None, token: str | None) -> LoadedText:
    """The held-out documents of a part are among its first ones, as many as the evaluation needs."""
    name = joined_name([part.name for part in parts])
    parts = parts if run.data.mixing.enabled else [_chained(parts)]
    firsts = [next(part.train.read(), None) for part in parts]
    for part, first in zip(parts, firsts, strict=True):
        if first is None:
            raise ShoalError(f"{part.name} is empty: there is no text in it")
    if run.data.tokenizer == "characters":
        raise ShoalError("the tokenizer `characters` must see the whole text first: set data.streaming to false, or use `bytes` or `bpe`")
    chats = any(first[0].conversation is not None for first in firsts if first is not None)
    encoding = find_encoding(run, lambda: (text for part in parts for text in _sample_of(part, run.seed)), cache_dir, token, chats=chats)
    train_count, eval_count = _counts(run)
    held = [_hold_out(part, encoding, -(-eval_count // len(parts)), run.seed) for part in parts]
    parts = [part._replace(train=documents) for part, (documents, _, _) in zip(parts, held, strict=True)]
    stream = _stream(parts, [out for _, out, _ in held], encoding, train_count, run)
    info = text_info(f"{name}: {f'{CONVERSATIONS}; ' if chats else ''}a stream of {noun(encoding)}", encoding)
    data = Data(stream, _held_out_samples([documents for _, _, documents in held], encoding, eval_count), info)

    def training_text() -> Iterable[Document]:
        for part, (_, out, _) in zip(parts, held, strict=True):
            yield from (document for number, (document, _) in enumerate(part.train.read()) if number not in out)

    expect_contexts(run, islice(training_text(), _BPE_DOCUMENTS))
    return LoadedText(data, training_text)


def _chained(parts: Sequence[TextPart]) -> TextPart:
    if len(parts) == 1:
        return parts[0]
    own = [part.held_out for part in parts if part.held_out is not None]
    name = joined_name([part.name for part in parts])
    return TextPart(name, ChainedDocuments([part.train for part in parts]), ChainedDocuments(own) if len(own) == len(parts) else None)


def _counts(run: Run) -> tuple[int | None, int]:
    """The numbers of training samples (None: all) and of held-out samples."""
    data, evaluation = run.data, run.evaluation
    held_out = STREAM_HELD_OUT if data.max_eval_samples is None else data.max_eval_samples
    if evaluation.batches is not None and evaluation.batch_size is not None:
        held_out = min(held_out, evaluation.batches * evaluation.batch_size)
    if data.max_samples is None:
        return data.max_train_samples, held_out
    held_out = min(held_out, max(1, round(data.max_samples * HELD_OUT_SHARE)), data.max_samples - 1)
    return min(data.max_samples - held_out, data.max_train_samples or data.max_samples), held_out


def _stream(parts: Sequence[TextPart], held: Sequence[HeldOut], encoding: Encoding, count: int | None, run: Run) -> SampleStream:
    shares = probabilities(parts, [part.train.size() for part in parts], run.data.mixing.temperature) if len(parts) > 1 else None
    quotas = [count] if shares is None or count is None else share_out(count, shares)
    streams = [
        TextStream(part.train, encoding, shuffle_buffer=run.data.shuffle_buffer, held_out=out, max_samples=quota)
        for part, out, quota in zip(parts, held, quotas * (len(parts) // len(quotas)), strict=True)
    ]
    return streams[0] if shares is None else MixedStream(streams, shares)


def _hold_out(part: TextPart, encoding: Encoding, count: int, seed: int) -> tuple[Documents, HeldOut, list[Document]]:
    """The training documents, which of them are skipped, and the held-out documents.

    Held-out documents are the part's own split; or every 20th document, until there are enough for `count` samples; or the end of each
    document, if there are fewer than 20.
    """
    if not count:
        return part.train, NOTHING_HELD_OUT, []
    if part.held_out is not None:
        return part.train, NOTHING_HELD_OUT, _until_enough(part.held_out, encoding, count, HeldOut(1, 0, 2**62))[0]
    every = HeldOut(FEW, seed % FEW, 2**62)
    documents, read = _until_enough(part.train, encoding, count, every)
    if read < FEW:
        ends = [cut(document)[1] for document, _ in part.train.read()]
        return DocumentFronts(part.train), NOTHING_HELD_OUT, [document for document in ends if document.text]
    return part.train, every._replace(below=read), documents


def _until_enough(documents: Documents, encoding: Encoding, count: int, held: HeldOut) -> tuple[list[Document], int]:
    """The held-out documents, and the number of documents that were read to find them."""
    found: list[Document] = []
    tokens, read = 0, 0
    wanted = count * encoding.sequence_length + 1
    for document, _ in documents.read():
        if read in held:
            found.append(document)
            tokens += len(encoding.tokenizer.encode_batch([document.text])[0])
        read += 1
        if tokens >= wanted or (len(found) >= count and not encoding.packed):
            break
    return found, read


def _held_out_samples(held: Sequence[Sequence[Document]], encoding: Encoding, count: int) -> TextSamples | None:
    if not any(held):
        return None
    samples = joined([text_samples(documents, encoding) for documents in held if documents])
    first = torch.arange(min(count, len(samples)))
    return samples.select(first) if len(first) else None


def _sample_of(part: TextPart, seed: int) -> Iterable[str]:
    """Some training documents, to train a vocabulary on."""
    some = islice(part.train.read(), _BPE_DOCUMENTS)
    return contents(document for number, (document, _) in enumerate(some) if number % FEW != seed % FEW)
