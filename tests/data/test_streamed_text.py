"""Text that comes id by id is the text of all ids at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.data import StreamedText
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


def test_half_a_character_waits_for_the_rest():
    stream = StreamedText(ByteTokenizer())
    assert [stream.add(byte) for byte in "é".encode()] == ["", "é"]
    stream.add("é".encode()[0])
    assert stream.finish() == "\ufffd"
