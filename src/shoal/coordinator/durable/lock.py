"""Lock on a folder: one coordinator per coordinator folder, one process per run folder. The operating system releases the lock when the
process ends.

Holds: only the owner can open a lock file, so that no other user of the machine can hold the lock. To remove or replace the
file is to take the lock from its holder, which notices before it writes again; file systems without locks have only that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from shoal.errors import ShoalError
from shoal.files import open_file, write_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NAME = "lock"
_held_here: set[Path] = set()
"""Lock files that this process holds, since it may test one of them itself."""


class FolderLock:
    """The lock on a folder."""

    def __init__(self, folder: Path) -> None:
        self._path, self._file = (folder / _NAME).absolute(), None  # type: tuple[Path, BinaryIO | None]

    def take(self) -> None:
        """Hold the lock until `release`. Raises ShoalError where another process has it."""
        if self._file is None:
            was_open = self._path.exists() and self._path.stat().st_mode & 0o077
            file = open_file(self._path, "ab", private=True)
            taken = _try(file)
            if taken is None:  # no locks here: a new file tells an earlier holder to stop
                file.close()
                write_file(self._path, "", private=True)
                file = open_file(self._path, "ab", private=True)
            elif not taken:
                file.close()
                others = (
                    f"; if there is none, another user holds {self._path}, which all could open until now: delete it" if was_open else ""
                )
                raise ShoalError(
                    f"another coordinator is at work in {self._path.parent}: end it first, or choose another --run-dir{others}"
                )
            self._file = file
            _held_here.add(self._path)

    def check(self) -> None:
        """Raises ShoalError where the lock was taken from this process."""
        try:
            if self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                return
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ShoalError(f"cannot see whether {self._path} is still held: {error.strerror or error}") from None
        raise ShoalError(
            f"{self._path} was removed or replaced, so another coordinator may be at work in {self._path.parent}: this one stops and"
            " writes nothing more. If there is no other, continue with --resume"
        )

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            _held_here.discard(self._path)


def is_held_elsewhere(folder: Path) -> bool:
    """Whether another process on this machine holds the lock of a folder. False where that is unknown."""
    return (folder / _NAME).absolute() not in _held_here and is_held(folder) is True


def is_held(folder: Path) -> bool | None:
    """Whether a process on this machine holds the lock of a folder; None where this user cannot open its file."""
    path = folder / _NAME
    try:
        if not os.path.lexists(path):
            return False
        with open_file(path, "r+b", private=True) as file:
            return _try(file) is False
    except (OSError, ShoalError):
        return None


def was_held(folder: Path) -> bool:
    """Whether the lock of a folder was held and is free now. False where that is unknown, or the file system has no locks."""
    try:
        with open_file(folder / _NAME, "r+b", private=True) as file:
            return _try(file) is True
    except ShoalError:
        return False


def _try(file: BinaryIO) -> bool | None:
    """Take the lock, and return whether that worked; None where the file system has no locks."""
    if fcntl is None:
        return _try_on_windows(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _try_on_windows(file: BinaryIO) -> bool:
    import msvcrt

    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    except OSError:
        return False
    return True
