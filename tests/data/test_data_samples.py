"""Packing loses no token, labels are what follows, padding and prompts do not count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import load_tokenizer
from shoal.data.text.documents import Document
from shoal.data.text.encoding import Encoding
from shoal.data.text.samples import PackedText, PaddedText, text_samples

BYTES = load_tokenizer("bytes")
EOS = 256
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


def everything(samples: Any) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = samples.batch(range(len(samples)))
    return batch


@given(documents=st.lists(texts, min_size=1, max_size=6), length=st.integers(1, 20))
def test_packing_loses_no_token_and_labels_are_the_shift(documents: list[str], length: int) -> None:
    tokens = [token for text in documents for token in [*text.encode(), EOS]][:-1]
    samples = text_samples([Document(text) for text in documents], Encoding(BYTES, length))
    assert isinstance(samples, PackedText)
    if len(tokens) < 2:
        assert len(samples) == 0
        return
    batch = everything(samples)
    inputs, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    assert batch["input_ids"].shape[1] == length
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs[: len(tokens) - 1].tolist() == tokens[:-1]
    assert labels[: len(tokens) - 1].tolist() == tokens[1:]
    assert (labels[len(tokens) - 1 :] == -100).all()
    assert len(inputs) - (len(tokens) - 1) < length, "only the last sequence is filled up"


@given(
    documents=st.lists(texts, min_size=1, max_size=6),
    length=st.integers(1, 20),
    batching=st.sampled_from(["dynamic", "padded"]),
    side=st.sampled_from(["left", "right"]),
    truncation=st.booleans(),
)
def test_padded_samples_are_documents(documents: list[str], length: int, batching: Any, side: Any, truncation: bool) -> None:
    encoding = Encoding(BYTES, length, batching, side, truncation)
    samples = text_samples([Document(text) for text in documents], encoding)
    assert isinstance(samples, PaddedText)
    batch = everything(samples)
    mask = batch["attention_mask"]
    assert mask.dtype == torch.bool
    assert mask.shape[1] == (length if batching == "padded" else int(mask.sum(1).max()))
    assert (batch["labels"][~mask] == -100).all()
    assert (batch["input_ids"][~mask] == BYTES.pad_id).all()
    filled = mask if side == "right" else mask.flip(1)
    assert (filled[:, :-1] >= filled[:, 1:]).all(), "padding is on one side only"
    expected_inputs, expected_labels = [], []
    for text in documents:
        tokens = [*text.encode(), EOS]
        used = tokens[: length + 1] if truncation else tokens
        expected_inputs += used[:-1]
        expected_labels += used[1:]
    assert batch["input_ids"][mask].tolist() == expected_inputs
    assert batch["labels"][mask].tolist() == expected_labels


@given(prompt=texts, completion=texts, length=st.integers(1, 80), batching=st.sampled_from(["packed", "dynamic"]))
def test_only_the_completion_is_learned(prompt: str, completion: str, length: int, batching: Any) -> None:
    encoding = Encoding(BYTES, length, batching, truncation=False)
    samples = text_samples([Document(completion, prompt=prompt)], encoding)
    batch = everything(samples) if len(samples) else {"labels": torch.zeros(0)}
    learned = [int(label) for label in batch["labels"].flatten() if label != -100]
    assert learned == [*completion.encode()] + ([EOS] if batching == "dynamic" else [])
    assert (batch["labels"] != -100).flatten(1).any(1).all(), "a sample with nothing to learn is no sample" if len(samples) else ""


def test_prompt_masks_stand_at_the_right_place() -> None:
    samples = text_samples([Document("cd", prompt="ab")], Encoding(BYTES, 8, "padded"))
    batch = everything(samples)
    assert batch["input_ids"][0].tolist() == [*b"abcd", EOS, EOS, EOS, EOS]
    assert batch["labels"][0].tolist() == [-100, *b"cd", EOS, -100, -100, -100, -100]
    assert batch["attention_mask"][0].tolist() == [True] * 4 + [False] * 4


def test_a_part_of_the_samples_is_that_part() -> None:
    documents = [Document(f"text number {i}") for i in range(10)]
    for batching in ("packed", "dynamic"):
        samples = text_samples(documents, Encoding(BYTES, 8, batching))
        chosen = torch.tensor([1, 3, 4])
        whole, part = samples.batch(chosen), everything(samples.select(chosen))
        for name in whole:
            assert torch.equal(whole[name], part[name])


def test_many_tokens_are_kept_small_and_given_out_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.text.samples._LONG_TOKENS", 10)
    for batching in ("packed", "dynamic"):
        samples = text_samples([Document("a long enough text")], Encoding(BYTES, 4, batching))
        stored = samples.inputs_NT if isinstance(samples, PackedText) else samples.inputs
        assert stored.dtype == (torch.int32 if batching == "packed" else torch.int64)
        assert everything(samples)["input_ids"].dtype == torch.int64
