"""Rows of whole documents hold the samples that dynamic batching gives, each once, with little padding."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import ShardFeed, load_tokenizer
from shoal.data.interfaces import IGNORED
from shoal.data.streams import text as streams
from shoal.data.streams.text import TextStream
from shoal.data.text.documents import Document, InMemoryDocuments
from shoal.data.text.encoding import Encoding
from shoal.data.text.packing import best_fit
from shoal.data.text.samples import PackedText, Truncated, joined, padding_note, text_samples

BYTES = load_tokenizer("bytes")
EOS = 256
documents = st.tuples(st.text("abc", min_size=1, max_size=30), st.text("xyz", max_size=8)).map(lambda both: Document(*both))
Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""Inputs and labels of a document."""


def packed(length: int, truncation: bool = True) -> Encoding:
    return Encoding(BYTES, length, truncation=truncation, packing="documents")


def pieces(batch: dict[str, torch.Tensor]) -> list[Piece]:
    """The documents of rows, and a check that the rest of each row is padding."""
    found: list[Piece] = []
    for inputs, labels, lengths in zip(*(batch[name].tolist() for name in ("input_ids", "labels", "document_lengths")), strict=True):
        end = sum(lengths)
        assert set(inputs[end:]) <= {BYTES.pad_id}
        assert set(labels[end:]) <= {IGNORED}
        starts = np.cumsum([0, *lengths]).tolist()
        found += [(tuple(inputs[at : at + size]), tuple(labels[at : at + size])) for at, size in zip(starts, lengths, strict=False) if size]
    return found


def one_by_one(texts: list[Document], length: int, truncation: bool) -> list[Piece]:
    """The samples of dynamic batching."""
    batch = text_samples(texts, Encoding(BYTES, length, "dynamic", truncation=truncation))
    rows = (batch.batch([number]) for number in range(len(batch)))
    return [(tuple(row["input_ids"][0].tolist()), tuple(row["labels"][0].tolist())) for row in rows]


def whole(samples: Any) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = samples.batch(range(len(samples)))
    return batch


@given(texts=st.lists(documents, min_size=1, max_size=12), length=st.integers(1, 40), truncation=st.booleans())
def test_each_document_is_in_one_row_as_it_is_alone(texts: list[Document], length: int, truncation: bool) -> None:
    samples = text_samples(texts, packed(length, truncation))
    assert isinstance(samples, PackedText)
    assert sorted(pieces(whole(samples))) == sorted(one_by_one(texts, length, truncation))


def test_prompts_stay_ignored_and_the_end_has_no_successor() -> None:
    """As in TRL's issue 3728: packing must not bring ignored labels back."""
    texts = [Document("cd", prompt="ab"), Document("g", prompt="ef")]
    batch = whole(text_samples(texts, packed(10)))
    assert batch["input_ids"].tolist() == [[*b"abcd", *b"efg", EOS, EOS, EOS]]
    assert batch["labels"].tolist() == [[-100, *b"cd", EOS, -100, *b"g", EOS, -100, -100, -100]]
    assert batch["document_lengths"].tolist() == [[4, 3]]


@pytest.mark.parametrize("batching", ["packed", "dynamic"])
def test_texts_that_lose_their_end_are_counted(batching: Any) -> None:
    texts = [Document("c", prompt="abcdefgh"), Document("cdefghij", prompt="ab"), Document("cde", prompt="abcd"), Document("d")]
    truncated, split = Truncated(), Truncated()
    text_samples(texts, Encoding(BYTES, 7, batching, packing="documents"), truncated)
    assert (truncated.count, truncated.unlearned) == (2, 1)
    assert truncated.note() == "; 2 texts are longer than data.sequence_length and lose their end, 1 of them all that is to be learned"
    text_samples(texts, Encoding(BYTES, 7, batching, packing="documents", truncation=False), split)
    assert split.note() == ""


@given(lengths=st.lists(st.integers(1, 20), max_size=60), room=st.integers(20, 40))
def test_rows_are_not_overfull_and_two_half_empty_ones_are_joined(lengths: list[int], room: int) -> None:
    rows = best_fit(lengths, room)
    used = [sum(lengths[number] for number in row) for row in rows]
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(total <= room for total in used)
    assert sum(2 * total <= room for total in used) <= 1
    assert rows == best_fit(list(lengths), room)


def mixed_texts(count: int = 2000) -> list[Document]:
    sizes = np.random.default_rng(0).lognormal(4, 0.9, count).clip(2, 500).astype(int)
    return [Document("x" * int(size), origin=str(number)) for number, size in enumerate(sizes)]


def test_little_is_padded_in_memory_and_as_a_stream() -> None:
    texts, encoding = mixed_texts(), packed(512)
    samples = text_samples(texts, encoding)
    note = padding_note([samples])
    assert note.startswith(" (2,000 texts, ")
    assert float(note.split(", ")[1].split("%")[0]) < 0.5
    stream = TextStream(InMemoryDocuments(texts), encoding)
    rows = list(stream.in_order((0, 1)))
    assert 1 - sum(sum(row.lengths) for row in rows) / (512 * len(rows)) < 0.02


def test_the_documents_of_a_row_are_known_by_their_origins() -> None:
    texts = mixed_texts(50)
    samples = joined([text_samples(texts[:30], packed(512)), text_samples(texts[30:], packed(512))])
    assert isinstance(samples, PackedText)
    assert samples.documents_NM is not None
    for number in range(len(samples)):
        sizes = [min(512, len(texts[int(origin)].text)) for origin in samples.origins.of(number)]
        assert [size for size in samples.documents_NM[number].tolist() if size] == sizes
    chosen = torch.tensor([2, 0])
    assert torch.equal(whole(samples.select(chosen))["document_lengths"], samples.batch(chosen)["document_lengths"])


def read(stream: TextStream, shard: tuple[int, int] = (0, 1), state: Any = None, count: int | None = None) -> list[tuple[Any, ...]]:
    samples = islice(stream.read(shard=shard, seed=1, epoch=0, state=state), count)
    return [(row.inputs.tolist(), row.labels.tolist(), row.lengths) for row in samples]


@settings(max_examples=30)
@given(
    texts=st.lists(documents, min_size=1, max_size=30),
    length=st.integers(4, 24),
    window=st.integers(1, 3),
    buffer=st.integers(1, 8),
    at=st.integers(0, 30),
)
def test_a_stream_goes_on_from_any_row(texts: list[Document], length: int, window: int, buffer: int, at: int) -> None:
    stream = TextStream(InMemoryDocuments(texts), packed(length, truncation=False), shuffle_buffer=buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_WINDOW", window)
        reader = stream.read(shard=(0, 1), seed=1, epoch=0)
        first = [(row.inputs.tolist(), row.labels.tolist(), row.lengths) for row in islice(reader, at)]
        state = json.loads(json.dumps(reader.state_dict()))
        assert first + read(stream, state=state) == read(stream)
        rows = [row for shard in range(2) for row in stream.read(shard=(shard, 2), seed=1, epoch=0)]
        found = pieces(stream.collate(rows)) if rows else []
    assert sorted(found) == sorted(one_by_one(texts, length, False))


def test_a_feed_goes_on_and_its_batches_have_few_shapes() -> None:
    stream = TextStream(InMemoryDocuments(mixed_texts(300)), packed(512), shuffle_buffer=8)
    feed = ShardFeed(stream, batch_size=2, seed=1)
    for _ in range(3):
        next(feed)
    state = json.loads(json.dumps(feed.state_dict()))
    expected = [next(feed) for _ in range(5)]
    other = ShardFeed(stream, batch_size=2, seed=1)
    other.load_state_dict(state)
    for batch in expected:
        again = next(other)
        assert all(torch.equal(batch[name], again[name]) for name in batch)
        width = batch["document_lengths"].shape[1]
        assert width & (width - 1) == 0
