"""Malformed messages, as only an attacker sends them."""

from __future__ import annotations

import random
import struct

import msgpack

from shoal.transports import Message
from shoal.transports.wire import Limits, encode

_VALID = [
    Message({}),
    Message({"kind": "pull", "have": 12, "session": "a" * 32}),
    Message(
        {"kind": "contribute", "seq": 5, "loss": 0.25, "layout": [[1, 2], [3, 4]], "about": {"host": "x", "raw": b"\0\1"}}, (b"abc", b"")
    ),
]


def valid(dice: random.Random) -> list[bytes]:
    return [bytes(part) for part in encode(dice.choice(_VALID), dice.randrange(2**40), Limits(1 << 20))]


def noise(dice: random.Random) -> list[bytes]:
    return [dice.randbytes(dice.choice((0, 1, 2, 7, 60, 300))) for _ in range(dice.randrange(1, 4))]


def truncated(dice: random.Random) -> list[bytes]:
    header, *frames = valid(dice)
    return [header[: dice.randrange(len(header))], *frames]


def mutated(dice: random.Random) -> list[bytes]:
    header, *frames = valid(dice)
    changed = bytearray(header)
    for _ in range(dice.randrange(1, 4)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return [bytes(changed), *frames]


def extended(dice: random.Random) -> list[bytes]:
    header, *frames = valid(dice)
    return [header + dice.randbytes(dice.randrange(1, 9)), *frames]


def nested(dice: random.Random) -> list[bytes]:
    depth = dice.choice((17, 40, 511, 1024, 5000, 60_000))
    return [_wrapped(dice.choice((b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff")) * depth + b"\xc0")]


def promising(dice: random.Random) -> list[bytes]:
    """Declares more than it has."""
    code = dice.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6"))
    return [_wrapped(b"\x81\xa1a" + code + struct.pack(">I", dice.choice((70_000, 2**24, 2**31, 2**32 - 1))) + dice.randbytes(20))]


def wide(dice: random.Random) -> list[bytes]:
    """Small on the wire, large once built."""
    return [_wrapped(b"\x81\xa1a" + b"\xdd" + struct.pack(">I", 200_000) + b"\x90" * 200_000)] if dice.random() < 0.02 else promising(dice)


def extension(dice: random.Random) -> list[bytes]:
    kind = dice.choice((-1, 0, 1, 5, 127))
    value = msgpack.ExtType(kind, dice.randbytes(4)) if kind >= 0 else msgpack.Timestamp(dice.randrange(2**31))
    return [msgpack.packb([1, 1, {"a": value}])]


def bad_text(dice: random.Random) -> list[bytes]:
    return [_wrapped(b"\x81\xa1a" + b"\xa4" + dice.choice((b"\xff\xfe\xfd\xfc", b"\xc3\x28ab", b"\xed\xa0\x80a")))]


def bad_keys(dice: random.Random) -> list[bytes]:
    key = dice.choice((1, b"a", None, 2.5, True, (1, 2)))
    return [msgpack.packb([1, 1, {"a": {key: 1}}])]


def twice(dice: random.Random) -> list[bytes]:
    return [_wrapped(b"\x82\xa1a\x01\xa1a\x02")]


def wrong_shape(dice: random.Random) -> list[bytes]:
    shapes: list[object] = [
        [],
        [1],
        [1, 1],
        [2, 1, {}],
        [1, -1, {}],
        [1, 1, []],
        [1, "1", {}],
        [True, 1, {}],
        [1, 1.0, {}],
        {},
        None,
        5,
        [1, 2**64 - 1, {}],
    ]
    return [msgpack.packb(dice.choice(shapes))]


def many_frames(dice: random.Random) -> list[bytes]:
    return [valid(dice)[0], *[b"x"] * dice.choice((17, 50, 1000))]


def _wrapped(header: bytes) -> bytes:
    return b"\x93\x01\x01" + header


ALWAYS_BAD = (truncated, extended, nested, promising, wide, extension, bad_text, bad_keys, twice, wrong_shape, many_frames)
ALL = (noise, mutated, *ALWAYS_BAD)
