"""Files with secrets in them."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.errors import ShoalError


def write_private(path: Path, text: str, user: tuple[int, int] | None = None) -> None:
    """A file that is there whole or not at all, and that only its owner can read. It never follows a link."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            if user:
                os.chown(descriptor, *user)
            file.write(text)
        os.replace(partial, path)
    except OSError as error:
        raise ShoalError(f"cannot write {path}: {error.strerror or error}") from None
