"""A stream gives every sample once an epoch, in shards that do not overlap, and goes on from any point exactly."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.schema.data import Loader
from shoal.data import SampleStream, ShardFeed, load_tokenizer
from shoal.data.streams.mixed import MixedStream
from shoal.data.streams.text import HeldOut, TextStream
from shoal.data.text.documents import ChainedDocuments, Document, Documents, InMemoryDocuments
from shoal.data.text.encoding import Encoding
from shoal.data.text.files import PIECE, TextFiles
from shoal.data.text.rows import Fields
from shoal.data.text.samples import text_samples
from shoal.errors import ShoalError

BYTES = load_tokenizer("bytes")
WORDS = [f"{i} " * (1 + i % 7) for i in range(40)]


def stream_of(documents: Documents, batching: Any = "packed", length: int = 8, buffer: int = 10, **options: Any) -> TextStream:
    return TextStream(documents, Encoding(BYTES, length, batching, truncation=False), shuffle_buffer=buffer, **options)


def mixed(buffer: int = 10) -> MixedStream:
    parts = [InMemoryDocuments(WORDS), InMemoryDocuments([f"another {i}" for i in range(15)]), InMemoryDocuments(["a single text"])]
    return MixedStream([stream_of(part, buffer=buffer) for part in parts], np.asarray([0.2, 0.5, 0.3]))


def rows(batch: dict[str, torch.Tensor]) -> list[Any]:
    return [batch[name].tolist() for name in sorted(batch)]


def read(
    stream: SampleStream, count: int | None = None, *, shard: tuple[int, int] = (0, 1), epoch: int = 0, state: Any = None
) -> list[Any]:
    samples = islice(stream.read(shard=shard, seed=1, epoch=epoch, state=state), count)
    return [(sample.inputs.tolist(), sample.labels.tolist()) for sample in samples]


def tokens_of(samples: Sequence[Any]) -> list[int]:
    return sorted(label for _, labels in samples for label in labels if label != -100)


def again(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("batching", ["packed", "dynamic"])
def test_a_stream_has_the_samples_that_are_had_in_memory(batching: Any) -> None:
    stream = stream_of(InMemoryDocuments(WORDS), batching)
    together = text_samples([Document(text) for text in WORDS], stream.encoding)
    in_order = [(sample.inputs.tolist(), sample.labels.tolist()) for sample in stream.in_order((0, 1))]
    labels = [label for _, labels in in_order for label in labels if label != -100]
    expected = [
        label for batch in (together.batch([i]) for i in range(len(together))) for label in batch["labels"][0].tolist() if label != -100
    ]
    assert labels == expected + ([256] if batching == "packed" else []), "a stream ends its last document too"
    shuffled = read(stream)
    assert sorted(map(str, shuffled)) == sorted(map(str, in_order))
    assert shuffled != in_order
    assert shuffled != read(stream, epoch=1)
    assert shuffled == read(stream)


@settings(max_examples=40)
@given(
    texts=st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=30),
    batching=st.sampled_from(["packed", "dynamic"]),
    length=st.integers(1, 12),
    buffer=st.integers(1, 12),
    shards=st.integers(1, 3),
    at=st.integers(0, 60),
)
def test_a_reader_goes_on_exactly(texts: list[str], batching: Any, length: int, buffer: int, shards: int, at: int) -> None:
    stream = stream_of(InMemoryDocuments(texts), batching, length, buffer)
    for index in range(shards):
        whole = read(stream, shard=(index, shards))
        reader = stream.read(shard=(index, shards), seed=1, epoch=0)
        list(islice(reader, at))
        assert read(stream, shard=(index, shards), state=again(reader.state_dict())) == whole[at:]


@given(shards=st.integers(1, 5), batching=st.sampled_from(["packed", "dynamic"]), seed=st.integers(0, 19))
def test_shards_partition_a_stream_and_leave_out_what_is_held_out(shards: int, batching: Any, seed: int) -> None:
    held = HeldOut(20, seed, 30)
    stream = stream_of(InMemoryDocuments(WORDS), batching, held_out=held)
    samples = [sample for index in range(shards) for sample in read(stream, shard=(index, shards))]
    kept = [text for number, text in enumerate(WORDS) if number not in held]
    assert len(kept) == len(WORDS) - len(range(seed, 30, 20))
    # In packed samples the first token of a shard is no label.
    lost = [ord(kept[index][0]) for index in range(shards)] if batching == "packed" else [ord(text[0]) for text in kept]
    assert sorted(tokens_of(samples) + lost) == sorted([byte for text in kept for byte in text.encode()] + [256] * len(kept))


def test_so_many_samples_and_no_more() -> None:
    stream = stream_of(InMemoryDocuments(WORDS), max_samples=7)
    assert [len(read(stream, shard=(index, 3))) for index in range(3)] == [3, 2, 2]


@settings(max_examples=30)
@given(at=st.integers(0, 150), buffer=st.integers(1, 20), shards=st.integers(1, 2))
def test_a_mixture_goes_on_exactly(at: int, buffer: int, shards: int) -> None:
    for index in range(shards):
        whole = read(mixed(buffer), shard=(index, shards))
        reader = mixed(buffer).read(shard=(index, shards), seed=1, epoch=0)
        list(islice(reader, at))
        assert read(mixed(buffer), shard=(index, shards), state=again(reader.state_dict())) == whole[at:]


def test_a_mixture_draws_by_weight_until_all_parts_were_read() -> None:
    """Part a has 1,000 samples, part b 100, drawn at 1 to 3: b comes round about 30 times until a is through."""
    parts = [InMemoryDocuments(["a" * 10] * 1000), InMemoryDocuments([f"b{i}" for i in range(100)])]
    mixture = MixedStream([stream_of(part, "dynamic", 16) for part in parts], np.asarray([0.25, 0.75]))
    first = read(mixture)
    drawn = ["a" if ord("a") in inputs else "b" for inputs, _ in first]
    assert drawn.count("a") == 1000
    assert abs(drawn.count("a") / len(drawn) - 0.25) < 0.02
    assert first != read(mixture, epoch=1)
    other = [inputs for inputs, _ in first if ord("b") in inputs]
    assert other[:100] != other[100:200], "each time round in an order of its own"
    assert sorted(other[:100]) == sorted(other[100:200])


def feed_of(
    stream: SampleStream, workers: int = 0, persistent: bool = True, shard: tuple[int, int] = (0, 1), drop: bool = True
) -> ShardFeed:
    loader = Loader(num_workers=workers, persistent_workers=persistent)
    return ShardFeed(stream, batch_size=3, seed=1, shard=shard, drop_last=drop, loader=loader)


@pytest.mark.parametrize(
    ("workers", "persistent"), [(0, True), *(pytest.param(2, kept, marks=pytest.mark.whole) for kept in (True, False))]
)
@pytest.mark.parametrize("make", [mixed, lambda: stream_of(InMemoryDocuments(WORDS))], ids=["mixture", "text"])
def test_a_feed_of_a_stream_goes_on_exactly(make: Any, workers: int, persistent: bool) -> None:
    feed = feed_of(make(), workers, persistent)
    whole, states, epochs = [], [], []
    for _ in range(140):
        states.append(again(feed.state_dict()))
        whole.append(rows(next(feed)))
        epochs.append(feed.epoch)
    feed.close()
    assert epochs[-1] >= 1, "the test goes into another epoch"
    assert whole[0] != whole[epochs.index(1)]
    last = epochs.index(1)
    for at in (0, 1, 8, last - 1, last, last + 2):
        resumed = feed_of(make(), workers, persistent)
        resumed.load_state_dict(states[at])
        assert [rows(next(resumed)) for _ in range(12)] == whole[at : at + 12]
        resumed.close()


def test_processes_read_a_stream_without_overlap() -> None:
    stream = stream_of(InMemoryDocuments(WORDS), "dynamic", 64)
    feed = feed_of(stream, workers=2, drop=False)
    seen = []
    while True:
        batch = next(feed)
        if feed.epoch:
            break
        seen += [label for label in batch["labels"].flatten().tolist() if label != -100]
    feed.close()
    assert sorted(seen) == tokens_of(read(stream))


def test_the_end_of_an_epoch_is_known_before_the_next_batch() -> None:
    feed = feed_of(stream_of(InMemoryDocuments(WORDS)))
    assert feed.batches_per_epoch is None
    assert not feed.at_epoch_end
    while not feed.at_epoch_end:
        state = feed.state_dict()
        next(feed)
    assert feed.epoch == 0
    assert feed.state_dict()["position"] == state["position"] + 1
    first = rows(next(feed))
    assert (feed.epoch, feed.position) == (1, 1)
    resumed = feed_of(stream_of(InMemoryDocuments(WORDS)))
    resumed.load_state_dict(again(state))
    next(resumed)
    assert resumed.at_epoch_end
    assert rows(next(resumed)) == first


def test_a_stream_is_not_taken_up_by_another_shard() -> None:
    feed = feed_of(stream_of(InMemoryDocuments(WORDS)))
    next(feed)
    with pytest.raises(ShoalError, match=r"shard .* was \[0, 1\], and is now \[0, 2\]"):
        feed_of(stream_of(InMemoryDocuments(WORDS)), shard=(0, 2)).load_state_dict(feed.state_dict())
    with pytest.raises(ShoalError, match=r"data\.loader\.num_workers was 0, and is now 2"):
        feed_of(stream_of(InMemoryDocuments(WORDS)), workers=2).load_state_dict(feed.state_dict())


def test_a_shard_without_a_batch_is_refused() -> None:
    with pytest.raises(ShoalError, match="not one batch of 3 samples in shard 2 of 2"):
        next(feed_of(stream_of(InMemoryDocuments(["one"])), shard=(1, 2)))


def piecewise(files: list[Path], position: Any = None) -> list[Any]:
    return list(TextFiles(files, Fields(), "piece").read(position))


@pytest.mark.parametrize("text", ["line of text, ü\n" * 5000, "ü" * 50_000, "x", "a" * PIECE, "a" * (PIECE - 1) + "\n", "\n" * 40_000])
def test_files_are_read_in_pieces_from_any_position(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    files = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    whole = piecewise(files)
    assert "".join(document.text for document, _ in whole) == text * 2
    assert sum(document.complete for document, _ in whole) == 2
    assert all(len(document.text.encode()) <= PIECE for document, _ in whole)
    for number, (_, position) in enumerate(whole, 1):
        assert piecewise(files, again(position)) == whole[number:]


def test_pieces_of_one_text_are_joined_again(tmp_path: Path) -> None:
    text = "some line\n" * 5000
    (tmp_path / "a.txt").write_text(text)
    stream = stream_of(TextFiles([tmp_path / "a.txt"], Fields(), "piece"), length=100)
    labels = [label for _, labels in ((s.inputs, s.labels.tolist()) for s in stream.in_order((0, 1))) for label in labels if label != -100]
    assert labels == [*text.encode()[1:], 256]


def test_chained_documents_go_on_in_the_right_part() -> None:
    chained = ChainedDocuments([InMemoryDocuments(["a", "b"]), InMemoryDocuments([]), InMemoryDocuments(["c", "d"])])
    whole = list(chained.read())
    assert [document.text for document, _ in whole] == list("abcd")
    for number, (_, position) in enumerate(whole, 1):
        assert list(chained.read(again(position))) == whole[number:]
    assert chained.size() == 4
