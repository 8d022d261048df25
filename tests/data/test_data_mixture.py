"""Mixtures draw by weight and temperature, evenly within each part, and follow from seed and epoch alone."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import ShardFeed, load, load_tokenizer
from shoal.data.splits import share_out
from shoal.data.text.documents import Document, InMemoryDocuments, TextPart
from shoal.data.text.encoding import Encoding
from shoal.data.text.mixture import ChainedText, MixedText, probabilities
from shoal.data.text.samples import text_samples
from shoal.errors import ShoalError

BYTES = load_tokenizer("bytes")


def parts_of(*sizes: int) -> list[Any]:
    return [
        text_samples([Document(f"{chr(97 + part)}{i:03d}") for i in range(size)], Encoding(BYTES, 16, "dynamic"))
        for part, size in enumerate(sizes)
    ]


def test_weights_sizes_and_temperature() -> None:
    def parts(weights: list[float | None]) -> list[TextPart]:
        return [TextPart(name, InMemoryDocuments([]), None, weight) for name, weight in zip("ab", weights, strict=True)]

    assert probabilities(parts([1.0, 3.0]), [10, 10], 1.0).tolist() == [0.25, 0.75]
    assert probabilities(parts([None, None]), [10, 90], 1.0) == pytest.approx([0.1, 0.9])
    assert probabilities(parts([None, None]), [10, 90], 2.0) == pytest.approx([0.25, 0.75])
    with pytest.raises(ShoalError, match="the size of b is not known"):
        probabilities(parts([None, None]), [10, None], 1.0)


@given(draws=st.integers(0, 1000), weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_sharing_out_adds_up(draws: int, weights: list[float]) -> None:
    shares = np.asarray(weights) / sum(weights)
    counts = share_out(draws, shares)
    assert sum(counts) == draws
    assert all(abs(count - share * draws) < 1 for count, share in zip(counts, shares, strict=True))


@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_an_epoch_has_as_many_draws_as_samples_by_share(sizes: list[int], seed: int) -> None:
    shares = np.arange(1, len(sizes) + 1) / sum(range(1, len(sizes) + 1))
    mixed = MixedText(parts_of(*sizes), shares)
    bounds = np.cumsum([0, *sizes])
    drawn: Counter[int] = Counter()
    for epoch in range(4):
        order = mixed.order(seed, epoch).tolist()
        assert len(order) == len(mixed) == sum(sizes)
        parts = Counter(int(np.searchsorted(bounds, number, side="right")) - 1 for number in order)
        assert [parts[part] for part in range(len(sizes))] == mixed.draws_of_part
        assert mixed.order(seed, epoch).tolist() == order
        drawn.update(order)
    for part, size in enumerate(sizes):
        times = [drawn[number] for number in range(int(bounds[part]), int(bounds[part]) + size)]
        assert max(times) - min(times) <= 1, "over the epochs each sample of a part is drawn as often as the others"


def test_without_mixing_parts_come_one_after_the_other() -> None:
    chained = ChainedText(parts_of(5, 7))
    order = chained.order(1, 0).tolist()
    assert sorted(order[:5]) == list(range(5))
    assert sorted(order[5:]) == list(range(5, 12))
    assert order != chained.order(1, 1).tolist()


@settings(max_examples=30)
@given(at=st.integers(0, 30), shards=st.integers(1, 3))
def test_a_feed_of_a_mixture_goes_on_exactly(at: int, shards: int) -> None:
    def feed(index: int) -> ShardFeed:
        return ShardFeed(MixedText(parts_of(9, 14), np.asarray([0.7, 0.3])), batch_size=2, seed=4, shard=(index, shards))

    for index in range(shards):
        whole = [batch["input_ids"].tolist() for batch in islice(feed(index), at + 8)]
        first, second = feed(index), feed(index)
        list(islice(first, at))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [batch["input_ids"].tolist() for batch in islice(second, 8)] == whole[at:]


def write_parts(folder: Path) -> None:
    (folder / "small").mkdir(parents=True)
    (folder / "small" / "one.txt").write_text("a" * 1000)
    (folder / "large.txt").write_text("b" * 9000)


def share_of_a(data: Any, batches: int = 40) -> float:
    feed = ShardFeed(data.train, batch_size=4, seed=1)
    tokens = [token for batch in islice(feed, batches) for token in batch["input_ids"].flatten().tolist()]
    return tokens.count(ord("a")) / (tokens.count(ord("a")) + tokens.count(ord("b")))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 0.1), (2.0, 0.25), (1000.0, 0.5)])
def test_a_folder_is_a_mixture_of_what_is_in_it(
    tmp_path: Path, make_run: Any, streaming: bool, temperature: float, expected: float
) -> None:
    write_parts(tmp_path)
    run = make_run(
        model__kind="gpt",
        data__source={"kind": "text", "path": str(tmp_path)},
        data__sequence_length=16,
        data__streaming=streaming,
        data__shuffle_buffer=20,
        data__mixing={"enabled": True, "temperature": temperature},
        data__max_eval_samples=5,
    )
    data = load(run)
    assert data.info.name.startswith("large.txt + small")
    assert share_of_a(data, 140) == pytest.approx(expected, abs=0.06)
    assert data.eval is not None


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_of_sources_by_weight(tmp_path: Path, make_run: Any, streaming: bool) -> None:
    write_parts(tmp_path)
    parts = [
        {"source": {"kind": "text", "path": str(tmp_path / "small")}, "weight": 3.0},
        {"source": {"kind": "text", "path": str(tmp_path / "large.txt")}, "weight": 1.0},
    ]
    settings = {"model__kind": "gpt", "data__sequence_length": 16, "data__streaming": streaming, "data__shuffle_buffer": 20}
    run = make_run(**settings, data__source={"kind": "mixture", "parts": parts}, data__mixing__enabled=True)
    assert share_of_a(load(run), 100) == pytest.approx(0.75, abs=0.06)
    with pytest.raises(ShoalError, match=r"the parts have weights, and data.mixing is off"):
        load(make_run(**settings, data__source={"kind": "mixture", "parts": parts}))
    unweighted = [{"source": part["source"]} for part in parts]
    data = load(make_run(**settings, data__source={"kind": "mixture", "parts": unweighted}))
    first = next(ShardFeed(data.train, batch_size=4, seed=1))["input_ids"]
    assert (first == ord("a")).any()
    if not streaming:
        assert (first == ord("a")).all(), "one source after the other"


def test_a_mixture_with_images_is_refused(make_run: Any) -> None:
    run = make_run(model__kind="gpt", data__source={"kind": "mixture", "parts": [{"source": {"kind": "builtin", "name": "digits"}}]})
    with pytest.raises(ShoalError, match="`digits` is not a text"):
        load(run)
