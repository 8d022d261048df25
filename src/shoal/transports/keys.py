"""Secrets for joining a run: a token that all workers of a run share, and the coordinator's own key pair for what travels encrypted.

The token is the only secret a worker is given. Its key pair for encryption is derived from it, so that the coordinator can recognise a
worker in the handshake, before it has taken a single message from it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import struct
from typing import NamedTuple

from shoal.errors import ShoalError

_TYPED = "abcdefghjkmnpqrstuvwxyz23456789"


class Keys(NamedTuple):
    """A key pair for CURVE, each half as 40 characters of Z85."""

    public: str
    secret: str


def new_token() -> str:
    """A random join token that is safe in an address, and in a command line, where a dash would begin an option."""
    return next(token for token in iter(lambda: secrets.token_urlsafe(24), "") if not token.startswith("-"))


def new_typed_token() -> str:
    """A random token that people copy from a screen: without characters that look alike (79 bits)."""
    return "".join(secrets.choice(_TYPED) for _ in range(16))


def new_keys() -> Keys:
    """A fresh key pair for a coordinator, of which the public half can be typed like a token."""
    import zmq

    while True:
        public, secret = (half.decode() for half in zmq.curve_keypair())
        if not key_text(public).startswith("-"):
            return Keys(public, secret)


def keys_from_secret(secret: str | bytes) -> Keys:
    """The pair that belongs to a secret key."""
    import zmq

    secret = secret.encode() if isinstance(secret, str) else bytes(secret)
    try:
        return Keys(zmq.curve_public(secret).decode(), secret.decode())
    except (ValueError, KeyError, zmq.ZMQError):
        raise ShoalError("this is not a secret key: 40 characters as `new_keys()` makes them are expected") from None


def keys_from_token(token: str) -> Keys:
    """The pair every worker with this token uses."""
    from zmq.utils import z85

    digest = hashlib.blake2b(token.encode(), digest_size=32, person=b"shoal worker key").digest()
    return keys_from_secret(z85.encode(digest))


def check(token: str) -> None:
    """Whether it can serve as a token at all; longer ones do not fit into a handshake."""
    if not 1 <= len(token.encode()) <= 255:
        raise ShoalError("a join token has 1 to 255 bytes")


def is_key(text: str) -> bool:
    """Whether this is half of a key pair in Z85."""
    from zmq.utils import z85

    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False


def same(one: bytes, other: bytes) -> bool:
    """Whether two secrets are equal. The time it takes does not reveal where they differ."""
    return hmac.compare_digest(one, other)


def key_text(key: str) -> str:
    """A public key in letters, digits, `-` and `_`: Z85 has characters that a shell would take for its own."""
    from zmq.utils import z85

    return base64.urlsafe_b64encode(z85.decode(key)).decode().rstrip("=")


def fingerprint(text: str) -> str:
    """80 bits of a public key's digest, in four groups for people to compare. No other key with the same fingerprint can be found."""
    digits = base64.b32encode(hashlib.sha256(text.encode()).digest()[:10]).decode().lower()
    return "-".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def key_from_text(text: str) -> str:
    """The key that `key_text` wrote."""
    from zmq.utils import z85

    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise ShoalError("--key is not a coordinator's key: copy the whole line that `shoal coordinate` printed")
    return z85.encode(raw).decode()
