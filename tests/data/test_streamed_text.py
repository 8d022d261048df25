"""Text that comes id by id is the text of all ids at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import StreamedText, TokenTexts
from shoal.data.text.tokenizers.library import LibraryTokenizer
from shoal.data.text.tokenizers.own import ByteTokenizer


@given(st.text(max_size=40))
def test_whole_characters_arrive_as_they_are(text):
    tokenizer = ByteTokenizer()
    stream = StreamedText(tokenizer, tokenizer.encode("before: "))
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 256), max_size=60))
def test_any_ids_give_text_and_no_more_than_a_few_wait(ids):
    stream = StreamedText(ByteTokenizer())
    for token in ids:
        stream.add(token)
        assert len(stream._ids) <= 20
    stream.finish()


_PIECES = st.sampled_from([*"aé€😀".encode(), 0xFF, 0xDD])


@given(st.lists(st.lists(_PIECES, min_size=1, max_size=4), max_size=20))
def test_bytes_that_are_no_text_give_the_same_text_however_many_come_at_once(groups):
    stream, ids = StreamedText(ByteTokenizer()), [*itertools.chain(*groups)]
    assert "".join([stream.add(*group) for group in groups] + [stream.finish()]) == ByteTokenizer().decode(ids)


def test_half_a_character_waits_for_the_rest():
    stream = StreamedText(ByteTokenizer())
    assert [stream.add(byte) for byte in "é".encode()] == ["", "é"]
    stream.add("é".encode()[0])
    assert stream.finish() == "\ufffd"


def test_a_single_token_keeps_the_space_that_it_has_within_a_text():
    """A decoder of SentencePiece removes the space at the beginning of a text."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = ["<unk>", "a", "▁Hello", "▁world", "s"]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    tokenizer = LibraryTokenizer(made, name="pieces", config={})
    ids = tokenizer.encode("Hello worlds")
    assert tokenizer.decode(ids) == "Hello worlds"
    assert [TokenTexts(tokenizer)[token] for token in ids] == [" Hello", " world", "s"]


def test_a_part_of_a_character_has_a_text_of_its_own():
    texts = TokenTexts(ByteTokenizer())
    assert [texts[token] for token in (65, 97, 0xC3)] == ["A", "a", "\ufffd"]
