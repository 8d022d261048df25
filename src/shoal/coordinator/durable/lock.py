"""One coordinator at a time is at work in a folder, and one process in that of a run. The system gives the lock back when the process ends,
however it ends."""

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
"""The folders whose locks this process has. It may look into one of them a second time."""


class FolderLock:
    """The lock on a folder."""

    def __init__(self, folder: Path) -> None:
        self._path, self._file = (folder / _NAME).absolute(), None  # type: tuple[Path, IO[bytes] | None]

    def take(self) -> None:
        """Hold it until `release`. Raises ShoalError where another has it."""
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
    """Whether another process is at work in a folder on this machine."""
    return (folder / _NAME).absolute() not in _held_here and is_held(folder)


def is_held(folder: Path) -> bool:
    """Whether a coordinator is at work in a folder on this machine."""
    try:
        with (folder / _NAME).open("ab") as file:
            return not _try(file)
    except OSError:  # there is no folder, or it is for reading only
        return False


def was_held(folder: Path) -> bool:
    """Whether somebody was at work in a folder, and is not any more. Where the file system has no locks, nobody can tell."""
    try:
        with (folder / _NAME).open("r+b") as file:
            return _try(file, without_locks=False)
    except OSError:
        return False


def _try(file: IO[bytes], without_locks: bool = True) -> bool:
    """Take the lock; whether that worked. `without_locks`: what to say where the file system has none; by default nobody is kept out."""
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
