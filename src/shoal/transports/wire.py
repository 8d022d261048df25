"""A message as frames: first a msgpack header `[version, number, header]`, then the message's own frames as they are.

Decoding trusts no input. The header's structure is checked before anything is built from it, because a few bytes can declare lists that
would fill the memory, or nest deep enough to exhaust a stack; what passes the survey is bounded by its own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]

from shoal.errors import ShoalError
from shoal.transports.interface import Frame, Message, Refused

VERSION = 1
MOST_FRAMES = 16
HEADER_BYTES = 1 << 20
"""Enough for a whole configuration; larger data belongs in a frame."""
_LARGEST_NUMBER = 2**63 - 1


class Malformed(ShoalError):
    """Bytes that are not a message of ours. `reason` is what the transports count it under."""

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class Limits(NamedTuple):
    """What a message may be at most."""

    frame_bytes: int
    header_bytes: int = HEADER_BYTES
    frames: int = MOST_FRAMES
    depth: int = 16
    items: int = 1 << 16
    """Values in the header altogether, however nested."""


def flat(frame: Frame) -> Frame:
    """The frame as plain bytes in one dimension, whatever it was a view of."""
    if isinstance(frame, bytes):
        return frame
    if not frame.c_contiguous:
        raise ValueError("a frame must be contiguous")
    if frame.nbytes == 0:
        return b""
    return frame if frame.format == "B" and frame.ndim == 1 else frame.cast("B")


def size_of(parts: Sequence[Frame]) -> int:
    return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)


def encode(message: Message, number: int, limits: Limits) -> list[Frame]:
    """The frames of a message; the receiver's limits apply already here, so that the sender gets the error."""
    header: bytes = msgpack.packb([VERSION, number, message.header], use_bin_type=True)
    parts: list[Frame] = [header, *map(flat, message.frames)]
    _check_sizes(parts, limits)
    return parts


def encode_request(message: Message, number: int, limits: Limits) -> list[Frame]:
    """The frames of a client's request. Raises Refused if it is larger than allowed."""
    try:
        return encode(message, number, limits)
    except Oversized as problem:
        raise Refused(str(problem), problem.reason) from None


def decode(parts: Sequence[Frame], limits: Limits) -> tuple[int, Message]:
    """The call's number and the message, or Malformed."""
    if not parts:
        raise Malformed("a message without a header")
    number, header = _open_header(bytes(parts[0][: limits.header_bytes + 1]), limits)
    _check_sizes(parts, limits, number)
    return number, Message(header, tuple(parts[1:]))


class Oversized(Malformed):
    """A valid message that is larger than allowed. Its number, where it is known, makes a reply to the sender possible."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message, "oversized")
        self.number = number


def refusal(reason: str, why: str) -> Message:
    """What a server itself answers to a request it does not pass on."""
    return Message({"kind": "refused", "reason": reason, "detail": why})


def _check_sizes(parts: Sequence[Frame], limits: Limits, number: int = 0) -> None:
    if len(parts) - 1 > limits.frames:
        raise Oversized(f"a message of {len(parts) - 1} frames; at most {limits.frames} are allowed", number)
    if len(parts[0]) > limits.header_bytes:
        raise Oversized(f"a header of {len(parts[0]):,} bytes; at most {limits.header_bytes:,} are allowed", number)
    largest = max((size_of([part]) for part in parts[1:]), default=0)
    if largest > limits.frame_bytes:
        raise Oversized(f"a frame of {largest:,} bytes; at most {limits.frame_bytes:,} are allowed", number)


def _open_header(data: bytes, limits: Limits) -> tuple[int, dict[str, Any]]:
    if len(data) > limits.header_bytes:
        raise Oversized(f"a header of more than {limits.header_bytes:,} bytes")
    survey(data, limits)
    try:
        opened = msgpack.unpackb(data, raw=False, strict_map_key=True, object_pairs_hook=_unique, ext_hook=_no_extension)
    except (ValueError, TypeError, msgpack.UnpackException) as problem:
        raise Malformed(f"a header that is not msgpack: {problem}") from None
    if not isinstance(opened, list) or len(opened) != 3 or type(opened[0]) is not int or opened[0] != VERSION:
        raise Malformed(f"not a message of version {VERSION}")
    _, number, header = opened
    if type(number) is not int or not 0 <= number <= _LARGEST_NUMBER or not isinstance(header, dict):
        raise Malformed("a header without a number and a mapping")
    return number, header


def _unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a key that is there twice")
    return found


def _no_extension(code: int, data: bytes) -> Any:
    raise Malformed("an extension type")


# --- the survey ---------------------------------------------------------------------------------------


class _Code(NamedTuple):
    """What a msgpack byte announces."""

    kind: str
    """`plain`, `text`, `list`, `map` or `banned`."""
    fixed: int
    """Bytes, or members, that follow for certain."""
    length_bytes: int = 0
    """How many bytes say how many more."""


def _code(byte: int) -> _Code:
    if byte <= 0x7F or byte >= 0xE0 or byte in (0xC0, 0xC2, 0xC3):
        return _Code("plain", 0)
    if byte <= 0x8F:
        return _Code("map", byte & 0x0F)
    if byte <= 0x9F:
        return _Code("list", byte & 0x0F)
    if byte <= 0xBF:
        return _Code("text", byte & 0x1F)
    return _SPELLED_OUT.get(byte, _Code("banned", 0))


_SPELLED_OUT = {
    **{0xC4 + power: _Code("plain", 0, 1 << power) for power in range(3)},  # bytes
    0xCA: _Code("plain", 4),  # floats
    0xCB: _Code("plain", 8),
    **{0xCC + power: _Code("plain", 1 << power) for power in range(4)},  # unsigned integers
    **{0xD0 + power: _Code("plain", 1 << power) for power in range(4)},  # signed integers
    **{0xD9 + power: _Code("text", 0, 1 << power) for power in range(3)},
    **{0xDC + power: _Code("list", 0, 2 << power) for power in range(2)},
    **{0xDE + power: _Code("map", 0, 2 << power) for power in range(2)},
}
_CODES = tuple(_code(byte) for byte in range(256))


_PLAIN_CODES = frozenset(byte for byte, code in enumerate(_CODES) if code.kind == "plain" and not code.length_bytes)
_TEXT_CODES = frozenset(byte for byte, code in enumerate(_CODES) if code.kind == "text" and not code.length_bytes)


def survey(data: bytes, limits: Limits) -> None:
    """Refuse a header by its structure alone: too deep, too many values, keys that are no text, lengths that reach beyond its end."""
    position, items, size = 0, 0, len(data)
    keyed, missing = False, 1
    """Of the list or map that is being read: whether it is a map, and how many members are still to come."""
    outer: list[tuple[bool, int]] = []
    while True:
        while not missing:
            if not outer:
                if position != size:
                    raise Malformed("bytes after the header")
                return
            keyed, missing = outer.pop()
        missing -= 1
        byte = data[position] if position < size else -1
        if byte in _TEXT_CODES:  # short text and short numbers, of which nearly all headers are made
            position += 1 + (byte & 0x1F)
        elif keyed and missing & 1:
            kind, length, position = _step(data, position)
            if kind != "text":
                raise Malformed("a key that is not text")
        elif byte in _PLAIN_CODES:
            position += 1 + _CODES[byte].fixed
        else:
            kind, length, position = _step(data, position)
            if kind in ("list", "map"):
                members = length * 2 if kind == "map" else length
                items += members
                outer.append((keyed, missing))
                keyed, missing = kind == "map", members
                if items > limits.items or len(outer) > limits.depth + 1:
                    raise Malformed("a header with too many values, or nested too deep")
        if position > size:
            raise Malformed("a header that ends too early")


def _step(data: bytes, position: int) -> tuple[str, int, int]:
    """What stands at a position, how long it is, and where the next value begins."""
    if position >= len(data):
        raise Malformed("a header that ends too early")
    kind, length, length_bytes = _CODES[data[position]]
    if kind == "banned":
        raise Malformed("an extension type, or a byte msgpack does not know")
    position += 1
    if length_bytes:
        length = int.from_bytes(data[position : position + length_bytes], "big")
        position += length_bytes
    if kind in ("plain", "text"):
        position += length
    if position > len(data):
        raise Malformed("a header that ends too early")
    return kind, length, position
