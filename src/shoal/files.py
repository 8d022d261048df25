"""Files that Shoal writes and reads back: replaced atomically, private where they hold secrets, with a version number of their format.

Holds: every error names the file. A link, a named pipe or a device in a file's place is refused, and never followed or waited for. A
private file is readable by its owner alone from its first byte on, also where it existed before with another mode.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, Literal, NamedTuple, TextIO, overload

from shoal.errors import ShoalError

MOST_BYTES = 64 << 20
"""The largest file that is read whole, where its reader names no other limit."""
_LONGEST_SECRET = 1000
_CHECKSUM = "checksum"
"""The field of a JSON file that is computed from all others."""
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
"""Opening a named pipe returns at once. Windows has neither this nor links that anyone can make."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFSOCK: "a socket"}


class DamagedFileError(ShoalError):
    """A file that Shoal wrote, or should have written, is not in its format."""


def make_folder(path: Path, *, private: bool = False) -> Path:
    """Make a folder and those above it; one that exists is left as it is. `private`: only its owner can enter it. Raises ShoalError."""
    try:
        path.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
    except OSError as error:
        raise ShoalError(f"cannot make the folder {path}: {error.strerror or error}") from None
    return path


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raises a ShoalError that names the file where writing it fails, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise ShoalError(f"cannot write {path}: {error.strerror or error}") from None


@overload
def open_file(path: Path, mode: Literal["ab", "wb", "xb", "r+b"], *, private: bool = False, buffering: int = -1) -> BinaryIO: ...


@overload
def open_file(path: Path, mode: Literal["a", "w"], *, private: bool = False, buffering: int = -1) -> TextIO: ...


def open_file(path: Path, mode: str, *, private: bool = False, buffering: int = -1) -> IO[Any]:
    """Open a regular file for writing; text is UTF-8. `private`: only its owner can read it. Raises ShoalError."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | _NO_WAIT | _NO_LINK, 0o600 if private else 0o666)
        try:
            _check_regular(path, os.fstat(descriptor))
            if private:
                make_private(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    with writing(path):
        _check_regular(path, path.lstat() if os.path.lexists(path) else None)  # opening it would only say that this cannot be done
        return open(path, mode, buffering, encoding=None if "b" in mode else "utf-8", opener=opener)


def _check_regular(path: Path, found: os.stat_result | None) -> None:
    """Raises DamagedFileError where something else than a regular file is in a file's place."""
    if found is not None and not stat.S_ISREG(found.st_mode):
        what = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise DamagedFileError(f"{path} is {what}, and a file belongs there: remove it, or put the file back")


def make_private(descriptor: int) -> None:
    """Correct the mode of a file that others can read. A file of another user stays as it is, and so does one on a read-only disk."""
    found = os.fstat(descriptor)
    if os.name == "posix" and found.st_mode & 0o077 and found.st_uid == os.geteuid():
        with suppress(OSError):
            os.fchmod(descriptor, 0o600)


def open_to_read(path: Path) -> BufferedReader:
    """Open a regular file, or the one that a link leads to, for reading. Raises FileNotFoundError, DamagedFileError where something else is
    in its place, and ShoalError where it cannot be opened."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAIT))  # noqa: SIM115 - the caller closes it
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise DamagedFileError(f"{path} is a folder, and a file belongs there: remove it, or put the file back") from None
    except OSError as error:
        hint = ": only the user who wrote it may read it" if isinstance(error, PermissionError) else ""
        raise ShoalError(f"cannot read {path}: {error.strerror or error}{hint}") from None
    try:
        _check_regular(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def read_file(path: Path, most_bytes: int = MOST_BYTES, *, private: bool = False) -> bytes | None:
    """The content of a regular file, or of one that a link leads to; None where there is none. `private`: a mode with which others can read
    it is corrected. Raises ShoalError, and DamagedFileError where something else is in its place or the file is too large."""
    try:
        with open_to_read(path) as file:
            if private:
                make_private(file.fileno())
            size = os.fstat(file.fileno()).st_size
            content = file.read() if size <= most_bytes else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ShoalError(f"cannot read {path}: {error.strerror or error}") from None
    if max(size, len(content)) > most_bytes:
        raise DamagedFileError(f"{path} is too large: it has more than the {most_bytes} bytes that such a file may have")
    return content


def secret_in(path: Path, create: Callable[[], str]) -> str:
    """The secret in a private file; it is created where there is none, and stays the same from then on. Raises ShoalError."""
    content = read_file(path, _LONGEST_SECRET, private=True)
    if content is None:
        write_file(path, secret := create(), private=True)
        return secret
    secret = content.decode("ascii", "replace").strip()
    if not secret or "\ufffd" in secret:
        raise DamagedFileError(f"{path} is damaged: put it back from a backup; or delete it, and another secret is made")
    return secret


def write_file(path: Path, text: str, *, private: bool = False, user: tuple[int, int] | None = None) -> None:
    """Write or replace a file atomically, without following a link. `private`: only its owner can read it; `user`: its owner, if
    another (uid, gid). Raises ShoalError."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with open(descriptor, "w", encoding="utf-8") as file:
            if user:
                os.chown(descriptor, *user)
            file.write(text)
        os.replace(partial, path)


def file_digest(path: Path) -> str:
    """SHA-256 of a file. Raises OSError and ShoalError."""
    with open_to_read(path) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check_format(source: PurePath | str, kind: str, found: object, expected: int, remedy: str = "use the version that wrote it") -> None:
    """Raises ShoalError where a format number that was read from a file is not the one that this version of Shoal reads."""
    if found != expected:
        has = f"{source} has no {kind} format number" if found is None else f"{source} has {kind} format {str(found)[:20]}"
        raise ShoalError(f"{has}, and this version of Shoal reads format {expected}: {remedy}")


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _checksum(fields: Mapping[str, Any]) -> str:
    """Checksum of the fields of a JSON object, whatever its layout."""
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


class JsonFormat(NamedTuple):
    """The format of a file that holds one JSON object, with a checksum of its fields. A file without a checksum is read unchecked."""

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
        write_file(path, self.text(fields, indent), private=self.private)

    def text(self, fields: Mapping[str, Any], indent: int | None = None) -> str:
        """The content of the file."""
        plain = json.loads(json.dumps({self.key: self.version} | dict(fields)))
        return json.dumps(plain | {_CHECKSUM: _checksum(plain)}, indent=indent)

    def read(self, path: Path) -> dict[str, Any] | None:
        """The fields without the version; None where there is no file. Raises DamagedFileError, and ShoalError for another version."""
        content = read_file(path, private=self.private)
        if content is None:
            return None
        try:
            fields = parse_json(content)
        except ValueError:
            fields = None
        if isinstance(fields, dict):
            checksum = fields.pop(_CHECKSUM, None)
            whole = checksum is None or checksum == _checksum(fields)
            check_format(path, self.kind, fields.pop(self.key, None), self.version, self.remedy)
            if not whole:
                raise DamagedFileError(
                    f"{path} does not match its checksum: it was damaged or edited. Put it back; if an edit is meant, remove the field "
                    f"`{_CHECKSUM}` from it"
                )
        if not isinstance(fields, dict) or any(name not in fields for name in self.required):
            raise DamagedFileError(f"{path} is not a valid {self.kind}")
        return fields
