"""The coordinator's seal on a receipt: proof for an audit that the coordinator confirmed a contribution.

The seal is an HMAC with a key that only the coordinator's folder holds. It covers the worker, the sequence number, a digest of the
contribution's line in the ledger, and the version.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path
from typing import Any

from shoal.files import DamagedFileError, secret_in

KEY_FILE = "receipts.key"
_JSON = json.JSONEncoder(separators=(",", ":"))
"""Created once, as every contribution is sealed."""


def key_in(folder: Path) -> bytes:
    """The key of a run, created if there is none yet. Raises ShoalError."""
    path = folder / KEY_FILE
    try:
        return bytes.fromhex(secret_in(path, lambda: secrets.token_hex(32)))
    except ValueError:
        raise DamagedFileError(f"{path} is damaged: restore it; or delete it, and an audit cannot check earlier receipts") from None


def digest_of(line: list[Any]) -> str:
    """Digest of a contribution's line in the ledger."""
    return hashlib.sha256(_JSON.encode(line).encode()).hexdigest()[:16]


def seal(key: bytes, worker: str, seq: int, digest: str, version: int) -> str:
    content = _JSON.encode([worker, seq, digest, version]).encode()
    return hmac.new(key, content, "sha256").hexdigest()[:32]
