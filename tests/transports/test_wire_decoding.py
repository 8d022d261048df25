"""Decoding what anybody may send: refused by name, at little cost, and nothing else ever comes out."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.transports import Message
from shoal.transports.wire import VERSION, Limits, Malformed, Oversized, decode, encode, flat, survey
from tests.support import malformed_messages

LIMITS = Limits(frame_bytes=1 << 20, header_bytes=1 << 18)
PLAIN = {int, float, str, bytes, bool, type(None)}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5), max_leaves=40
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=20), values, max_size=8), st.lists(st.binary(max_size=99), max_size=16), st.integers(0, 2**63 - 1))
def test_a_message_survives_the_wire(header: dict[str, Any], frames: list[bytes], number: int) -> None:
    message = Message(header, tuple(frames))
    assert decode(encode(message, number, LIMITS), LIMITS) == (number, message)


@given(values)
def test_the_survey_agrees_with_msgpack(value: object) -> None:
    survey(msgpack.packb(value), LIMITS)


@pytest.mark.parametrize("make", malformed_messages.ALWAYS_BAD, ids=lambda make: make.__name__)
def test_hostile_messages_are_malformed(make: Any) -> None:
    dice = random.Random(3)
    for _ in range(300):
        with pytest.raises(Malformed):
            decode(make(dice), LIMITS)


def test_thousands_of_hostile_messages() -> None:
    dice = random.Random(7)
    accepted = 0
    for index in range(26_000):
        parts = malformed_messages.ALL[index % len(malformed_messages.ALL)](dice)
        try:
            number, message = decode(parts, LIMITS)
        except Malformed:
            continue
        accepted += 1  # a mutation may hit a letter of a value: then it is a message like any other
        assert 0 <= number < 2**63
        check_plain(message.header)
    assert accepted < 5_000


def check_plain(value: object) -> None:
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            check_plain(inner)
    else:
        assert type(value) in PLAIN


def test_refusing_costs_little_memory_and_time() -> None:
    dice = random.Random(1)
    worst = [make(dice) for make in (malformed_messages.nested, malformed_messages.promising, malformed_messages.wide) for _ in range(300)]
    tracemalloc.start()
    try:
        for parts in worst:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            began = time.thread_time()
            with pytest.raises(Malformed):
                decode(parts, LIMITS)
            assert time.thread_time() - began < 2.0
            assert tracemalloc.get_traced_memory()[1] - before < 2_000_000
    finally:
        tracemalloc.stop()


def test_sizes_are_limited_with_the_number_known() -> None:
    number, limits = 77, Limits(frame_bytes=10, header_bytes=100)
    for message in (Message({}, (b"x" * 11,)), Message({}, (b"",) * 17)):
        parts = encode(message, number, Limits(100, frames=99))
        with pytest.raises(Oversized) as refused:
            decode(parts, limits)
        assert refused.value.number == number
    with pytest.raises(Oversized, match="header"):
        decode(encode(Message({"a": "x" * 200}), 1, LIMITS), limits)


def test_a_sender_hears_of_its_own_mistakes() -> None:
    with pytest.raises(Oversized):
        encode(Message({}, (bytes(11),)), 1, Limits(10))
    with pytest.raises(TypeError):
        encode(Message({"a": object()}), 1, LIMITS)
    with pytest.raises(ValueError, match="contiguous"):
        flat(memoryview(b"abcdef")[::2])


def test_nothing_is_no_message() -> None:
    with pytest.raises(Malformed):
        decode([], LIMITS)
    with pytest.raises(Malformed):
        decode([b""], LIMITS)


def test_another_version_is_refused() -> None:
    with pytest.raises(Malformed, match="version"):
        decode([msgpack.packb([VERSION + 1, 1, {}])], LIMITS)
