"""A worker's identity: an Ed25519 key (RFC 8032) with which it signs the coordinator's challenge when it joins.

The run's token is shared by all workers; a worker's name belongs to the key that was first used with it. `cryptography` is imported when a
key is first used: importing it takes 20 ms, which `shoal --help` need not pay.
"""

from __future__ import annotations

import secrets
from functools import cache
from typing import NamedTuple

_FIELD_PRIME = 2**255 - 19
_SMALL_ORDER = frozenset(
    (
        0,
        1,
        _FIELD_PRIME - 1,
        2707385501144840649318225287225658788936804267575313519463743609750303402022,
        55188659117513257062467267217118295137698188065244968500265048394206261417927,
    )
)
"""The y coordinates of the eight points of small order. As public keys they accept signatures for which no secret key exists, and OpenSSL
does not refuse them."""


def sign(secret: bytes, text: bytes) -> bytes:
    """The signature of a text: 64 bytes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).sign(text)


def public_key(secret: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def is_signed(public: bytes, text: bytes, signature: bytes) -> bool:
    """Whether the text was signed with the secret half of this key. All arguments may come from an untrusted peer."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    y = int.from_bytes(public, "little") & (1 << 255) - 1
    if len(public) != 32 or y >= _FIELD_PRIME or y in _SMALL_ORDER:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity(NamedTuple):
    """A worker's key for one run and one name. Keys and signatures travel as hexadecimal text."""

    secret: str

    @classmethod
    def new(cls) -> Identity:
        return cls(secrets.token_hex(32))

    @property
    def key(self) -> str:
        """The public half, by which the coordinator knows the worker."""
        return _public_text(self.secret)

    def prove(self, purpose: str, name: str, nonce: str) -> str:
        """Sign that this worker requests `purpose` now; the coordinator made the nonce for this one request."""
        return sign(bytes.fromhex(self.secret), _statement(purpose, name, nonce)).hex()


@cache
def _public_text(secret: str) -> str:
    return public_key(bytes.fromhex(secret)).hex()


def is_proved(key: str, purpose: str, name: str, nonce: str, proof: str) -> bool:
    return is_signed(bytes.fromhex(key), _statement(purpose, name, nonce), bytes.fromhex(proof))


def _statement(purpose: str, name: str, nonce: str) -> bytes:
    return "\0".join(("shoal", purpose, name, nonce)).encode()
