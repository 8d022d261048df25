"""Lock on a folder: one coordinator per coordinator folder, one process per run folder. The operating system releases the lock when the
process ends."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from shoal.errors import ShoalError

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
        self._path, self._file = (folder / _NAME).absolute(), None  # type: tuple[Path, IO[bytes] | None]

    def take(self) -> None:
        """Hold the lock until `release`. Raises ShoalError where another process has it."""
        if self._file is None:
            try:
                file = self._path.open("ab")
            except OSError as error:
                raise ShoalError(f"cannot write in the coordinator's folder {self._path.parent}: {error.strerror or error}") from None
            if not _try(file):
                file.close()
                raise ShoalError(f"another coordinator is at work in {self._path.parent}: end it first, or choose another --run-dir")
            self._file = file
            _held_here.add(self._path)

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            _held_here.discard(self._path)


def is_held_elsewhere(folder: Path) -> bool:
    """Whether another process on this machine holds the lock of a folder."""
    return (folder / _NAME).absolute() not in _held_here and is_held(folder)


def is_held(folder: Path) -> bool:
    """Whether a process on this machine holds the lock of a folder."""
    try:
        with (folder / _NAME).open("ab") as file:
            return not _try(file)
    except OSError:  # there is no folder, or it is for reading only
        return False


def was_held(folder: Path) -> bool:
    """Whether the lock of a folder was held and is free now. False where the file system has no locks."""
    try:
        with (folder / _NAME).open("r+b") as file:
            return _try(file, without_locks=False)
    except OSError:
        return False


def _try(file: IO[bytes], without_locks: bool = True) -> bool:
    """Take the lock, and return whether that worked. `without_locks`: the result where the file system has no locks."""
    if fcntl is None:
        return _try_on_windows(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    return True


def _try_on_windows(file: IO[bytes]) -> bool:
    import msvcrt

    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    except OSError:
        return False
    return True
