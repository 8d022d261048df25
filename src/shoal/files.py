"""Files that Shoal writes and reads back: replaced atomically, private where they hold secrets, with a version number of their format."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from shoal.errors import ShoalError


class DamagedFileError(ShoalError):
    """A file that Shoal wrote, or should have written, is not in its format."""


def write_file(path: Path, text: str, *, private: bool = False, user: tuple[int, int] | None = None) -> None:
    """Write or replace a file atomically, without following a link. `private`: only its owner can read it; `user`: its owner, if
    another (uid, gid). Raises ShoalError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with open(descriptor, "w", encoding="utf-8") as file:
            if user:
                os.chown(descriptor, *user)
            file.write(text)
        os.replace(partial, path)
    except OSError as error:
        raise ShoalError(f"cannot write {path}: {error.strerror or error}") from None


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check_format(source: PurePath | str, kind: str, found: object, expected: int, remedy: str = "use the version that wrote it") -> None:
    """Raises ShoalError where a format number that was read from a file is not the one that this version of Shoal reads."""
    if found != expected:
        has = f"{source} has no {kind} format number" if found is None else f"{source} has {kind} format {str(found)[:20]}"
        raise ShoalError(f"{has}, and this version of Shoal reads format {expected}: {remedy}")


class JsonFormat(NamedTuple):
    """The format of a file that holds one JSON object."""

    kind: str
    """For messages: `owner file`."""
    version: int
    required: tuple[str, ...] = ()
    """Fields without which a file is damaged."""
    private: bool = False
    remedy: str = "use the version that wrote it"
    """What the user can do about a file of another version."""
    key: str = "format"
    """The field of the version."""

    def write(self, path: Path, fields: Mapping[str, Any], indent: int | None = None) -> None:
        """Write or replace the file atomically. Raises ShoalError."""
        write_file(path, json.dumps({self.key: self.version} | dict(fields), indent=indent), private=self.private)

    def read(self, path: Path) -> dict[str, Any] | None:
        """The fields without the version; None where there is no file. Raises DamagedFileError, and ShoalError for another version."""
        try:
            fields = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            hint = ". Only the user who started the run may read it" if self.private else ""
            raise ShoalError(f"{path} cannot be read: {error.strerror or error}{hint}") from None
        except (ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict):
            check_format(path, self.kind, fields.pop(self.key, None), self.version, self.remedy)
        if not isinstance(fields, dict) or any(name not in fields for name in self.required):
            raise DamagedFileError(f"{path} is not a valid {self.kind}")
        return fields
