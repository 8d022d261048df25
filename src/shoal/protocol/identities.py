"""Who a worker is: an Ed25519 key of its own (RFC 8032), with which it signs the coordinator's question when it joins.

The token opens the door and is shared; a name belongs to the key that brought it. Signing and checking take a few milliseconds in plain
Python, and happen only when a worker joins or is said to be gone, so this asks for no further package. The time that signing takes depends
on the key, which nobody but the worker's own machine can measure closely enough: the coordinator asks it rarely, and over a network.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import cache
from typing import NamedTuple

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT_OF_MINUS_1 = pow(2, (_P - 1) // 4, _P)


class _Point(NamedTuple):
    """A point on the curve in extended coordinates: x = X / Z, y = Y / Z, x · y = T / Z."""

    x: int
    y: int
    z: int
    t: int


_NOTHING = _Point(0, 1, 1, 0)


def _add(one: _Point, other: _Point) -> _Point:
    a, b = (one.y - one.x) * (other.y - other.x) % _P, (one.y + one.x) * (other.y + other.x) % _P
    c, d = 2 * one.t * other.t * _D % _P, 2 * one.z * other.z % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return _Point(e * f % _P, g * h % _P, f * g % _P, e * h % _P)


def _double(point: _Point) -> _Point:
    a, b = point.x * point.x % _P, point.y * point.y % _P
    c, h = 2 * point.z * point.z, a + b
    e, g = h - (point.x + point.y) ** 2 % _P, a - b
    f = c + g
    return _Point(e * f % _P, g * h % _P, f * g % _P, e * h % _P)


def _sum(factors: list[tuple[int, list[_Point]]]) -> _Point:
    """The sum of points, each so many times; of each point its first 16 multiples are given. Four bits are taken at a time."""
    total = _NOTHING
    for shift in range(252, -1, -4):
        if total is not _NOTHING:
            total = _double(_double(_double(_double(total))))
        for times, multiples in factors:
            if digit := times >> shift & 15:
                total = _add(total, multiples[digit])
    return total


def _multiples(point: _Point) -> list[_Point]:
    found = [_NOTHING]
    for _ in range(15):
        found.append(_add(found[-1], point))
    return found


@cache
def _base() -> list[_Point]:
    point = _decompress((4 * pow(5, -1, _P) % _P).to_bytes(32, "little"))
    assert point is not None
    return _multiples(point)


def _compress(point: _Point) -> bytes:
    inverse = pow(point.z, -1, _P)
    x, y = point.x * inverse % _P, point.y * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _decompress(text: bytes) -> _Point | None:
    """The point that was written so; None where there is none."""
    number = int.from_bytes(text, "little")
    y, odd = number & (1 << 255) - 1, number >> 255
    if y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT_OF_MINUS_1 % _P
    if (x * x - square) % _P or (not x and odd):
        return None
    x = _P - x if x & 1 != odd else x
    return _Point(x, y, 1, x * y % _P)


def _hash(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little")


def sign(secret: bytes, text: bytes) -> bytes:
    """The signature of a text: 64 bytes."""
    digest = hashlib.sha512(secret).digest()
    scalar = int.from_bytes(digest[:32], "little") & (1 << 254) - 8 | 1 << 254
    public = _compress(_sum([(scalar, _base())]))
    nonce = _hash(digest[32:], text) % _ORDER
    commitment = _compress(_sum([(nonce, _base())]))
    answer = (nonce + _hash(commitment, public, text) * scalar) % _ORDER
    return commitment + answer.to_bytes(32, "little")


def public_of(secret: bytes) -> bytes:
    scalar = int.from_bytes(hashlib.sha512(secret).digest()[:32], "little") & (1 << 254) - 8 | 1 << 254
    return _compress(_sum([(scalar, _base())]))


def is_signed(public: bytes, text: bytes, signature: bytes) -> bool:
    """Whether whoever has the secret half of this key has signed the text. Anything may be passed in: it is a stranger's."""
    if len(public) != 32 or len(signature) != 64:
        return False
    point, answer = _decompress(public), int.from_bytes(signature[32:], "little")
    if point is None or answer >= _ORDER or _is_small(point):
        return False
    times = _hash(signature[:32], public, text) % _ORDER
    negative = _Point(_P - point.x, point.y, 1, _P - point.t)
    return _compress(_sum([(answer, _base()), (times, _multiples(negative))])) == signature[:32]


def _is_small(point: _Point) -> bool:
    """Whether this is one of the eight points that fit signatures which nobody made."""
    eightfold = _double(_double(_double(point)))
    return eightfold.x % _P == 0


class Identity(NamedTuple):
    """A worker's own key, for one run and one name. Keys and signatures travel as hexadecimal text."""

    secret: str

    @classmethod
    def new(cls) -> Identity:
        return cls(secrets.token_hex(32))

    @property
    def key(self) -> str:
        """The public half, which names the worker to the coordinator."""
        return _public_text(self.secret)

    def prove(self, purpose: str, name: str, nonce: str) -> str:
        """The proof that this worker itself says this, now: the coordinator made up the nonce for this one question."""
        return sign(bytes.fromhex(self.secret), _statement(purpose, name, nonce)).hex()


@cache
def _public_text(secret: str) -> str:
    return public_of(bytes.fromhex(secret)).hex()


def is_proved(key: str, purpose: str, name: str, nonce: str, proof: str) -> bool:
    return is_signed(bytes.fromhex(key), _statement(purpose, name, nonce), bytes.fromhex(proof))


def _statement(purpose: str, name: str, nonce: str) -> bytes:
    return "\0".join(("shoal", purpose, name, nonce)).encode()
