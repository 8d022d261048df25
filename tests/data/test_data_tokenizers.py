"""Every tokenizer gives its text back, and is the same after it was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import Tokenizer, load_tokenizer
from shoal.data.text.tokenizers.library import LibraryTokenizer, PretrainedTokenizer, _pieces
from shoal.errors import ShoalError

TEXT = "the cat sat on the mat, and the dog sat on the log.\n" * 40
any_text = st.text(st.characters(codec="utf-8"), max_size=60)


def bpe(text: str = TEXT, **options: Any) -> Tokenizer:
    return load_tokenizer("bpe", texts=lambda: [text], **options)


BPE = bpe()


@given(any_text)
def test_bytes_are_utf8(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.encode_batch([text])[0].tolist() == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), 256]) == text
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


@given(any_text.filter(bool))
def test_characters_are_sorted(text: str) -> None:
    tokenizer = load_tokenizer("characters", texts=lambda: [text])
    alphabet = sorted(set(text))
    assert tokenizer.vocab_size == len(alphabet)
    assert tokenizer.encode(text) == [alphabet.index(character) for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(ShoalError, match="does not know 'xé'"):
        load_tokenizer("characters", texts=lambda: ["abc"]).encode("aéx")


@given(any_text)
def test_bpe_gives_any_text_back(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


def test_bpe_has_words_and_an_end() -> None:
    assert BPE.vocab_size <= 4096
    assert len(BPE.encode("the cat sat on the mat")) < 10
    assert BPE.eos_id is not None
    assert BPE.encode("<|endoftext|>") == [BPE.eos_id]
    assert BPE.separator == (BPE.eos_id,)


def test_bpe_is_trained_once_per_text(tmp_path: Path) -> None:
    first = bpe(cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    assert bpe(cache_dir=tmp_path).encode(TEXT) == first.encode(TEXT) == BPE.encode(TEXT)
    assert file.stat().st_mtime_ns == written
    bpe("another text, another vocabulary", cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("spec", ["bytes", "bpe", "characters"])
def test_saved_and_loaded_is_the_same(spec: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(spec, texts=lambda: [TEXT])
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(str(tmp_path / "saved"))
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    for name in ("name", "vocab_size", "eos_id", "pad_id", "separator"):
        assert getattr(loaded, name) == getattr(tokenizer, name)


def test_a_saved_bpe_is_one_for_transformers_too(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    BPE.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs(TEXT)["input_ids"] == BPE.encode(TEXT)
    assert theirs.eos_token_id == BPE.eos_id


def test_gpt2_files(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "gpt2_tokenizer"))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    text = (shared_data / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    assert len(ids) == 338_025
    assert tokenizer.decode(ids) == text
    tokenizer.save(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode(text[:5000]) == tokenizer.encode(text[:5000])


def test_a_long_text_is_cut_where_tokens_do_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a line\n\n\nand  more\nlines\n   of text \n" * 50
    tokenizer = bpe(text)
    whole = tokenizer.encode(text)
    monkeypatch.setattr("shoal.data.text.tokenizers.library._PIECE", 5)
    assert len(_pieces(text)) > 20
    assert "".join(_pieces(text)) == text
    assert tokenizer.encode(text) == whole
    assert sum(len(tokenizer.encode(line)) for line in text.splitlines(keepends=True)) > len(whole), "other cuts would show"
    monkeypatch.setattr("shoal.data.text.tokenizers.library._CHUNK", 50)
    assert [ids.tolist() for ids in tokenizer.encode_batch([text, "", "a line"])] == [whole, [], tokenizer.encode("a line")]


def test_a_folder_of_a_transformers_tokenizer(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_type": "bert"}), encoding="utf-8"
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, PretrainedTokenizer)
    assert tokenizer.encode("the cats sat") == [5, 6, 8, 7], "no special tokens are added"
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (9, 0)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).encode("the cats sat") == [5, 6, 8, 7]


def test_a_tokenizer_json_forgets_old_truncation(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.WordLevel({"a": 0, "b": 1, "</s>": 2, "[UNK]": 3}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.enable_truncation(2)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert isinstance(tokenizer, LibraryTokenizer)
    assert tokenizer.encode("a b a b") == [0, 1, 0, 1]
    assert tokenizer.eos_id == 2


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("byts", r"`byts` \(did you mean `bytes`\?\) is no folder here and not in the cache, .* cannot be reached: put tokenizer.json"),
        ("nobody/nothing-of-this-name", "cannot be reached"),
        ("./no/such/folder", "there is nothing at ./no/such/folder"),
        ("bpe", "made from the training text"),
    ],
)
def test_unknown_tokenizers(spec: str, message: str) -> None:
    with pytest.raises(ShoalError, match=message):
        load_tokenizer(spec)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=r"no tokenizer in .*: expected tokenizer.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ShoalError, match="is not a tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.usefixtures("no_network")
def test_a_misspelt_model_is_found_under_its_own_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    with pytest.raises(
        ShoalError, match=r"model.pretrained: `my-modle` \(did you mean `my-model`\?\) is no folder here .*: set it to a folder"
    ):
        load_tokenizer("my-modle", setting="model.pretrained")
