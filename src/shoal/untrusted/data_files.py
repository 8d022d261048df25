"""Data that somebody else made: text, arrays and archives, compressed or not.

Holds: nothing waits for a named pipe; what comes out of a compressed file is at most `MOST_RATIO` times its size, beyond the first
megabytes; an array's header claims what follows it, before memory is taken for it; one line or one archived file has a largest size.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from shoal.errors import ShoalError

MOST_RATIO = 100
"""Text shrinks to a fourth, tables to a twentieth; a file of zeros to a thousandth."""
FREE_BYTES = 64 << 20
"""What any compressed file may become."""
LONGEST_LINE = 256 << 20
MOST_MEMBER_BYTES = 256 << 20
"""The largest file of an archive of small files, such as images."""
_BUFFER = 1 << 18


def open_data(file: Path, compressed: bool) -> IO[bytes]:
    """Open a regular file, decompressed if it is gzipped. Raises ShoalError where it is none, and later where it grows too much."""
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ShoalError(f"{file} is no regular file: remove it, or put the file back")
    opened = os.fdopen(descriptor, "rb")
    if not compressed:
        return opened
    return io.BufferedReader(_Growing(file, gzip.GzipFile(fileobj=opened), opened, allowed_bytes(found.st_size)), _BUFFER)


def allowed_bytes(compressed_size: int) -> int:
    """What a compressed file of this size may become."""
    return max(FREE_BYTES, MOST_RATIO * compressed_size)


class _Growing(io.RawIOBase):
    """A gzipped file that is read up to a size."""

    def __init__(self, file: Path, content: gzip.GzipFile, opened: IO[bytes], most: int) -> None:
        self._file, self._content, self._opened, self._most = file, content, opened, most

    def readinto(self, buffer: Any) -> int:
        count = self._content.readinto(buffer)
        if self._content.tell() > self._most:
            raise grows_too_much(self._file, self._most)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._content.seek(offset, whence)

    def tell(self) -> int:
        return self._content.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._content.close()
        self._opened.close()
        super().close()


def grows_too_much(file: Path | str, most: int) -> ShoalError:
    return ShoalError(
        f"{file} is refused: decompressed it has more than {most:,} bytes, {MOST_RATIO} times its size, as only a file has that is made to "
        "fill a memory: decompress it yourself if you trust it"
    )


def lines_of(file: Path, content: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file. Raises ShoalError where one is longer than any text."""
    while raw := content.readline(LONGEST_LINE + 1):
        if len(raw) > LONGEST_LINE:
            raise ShoalError(f"{file} is refused: a line of it has more than {LONGEST_LINE:,} bytes")
        yield raw


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """A file of a zip archive. Raises ShoalError where it is larger than an image is. The library reads no more than it claims."""
    size = archive.getinfo(name).file_size
    if size > MOST_MEMBER_BYTES:
        raise ShoalError(f"{archive.filename}/{name} is refused: it claims {size:,} bytes, and at most {MOST_MEMBER_BYTES:,} are read")
    return archive.read(name)


def check_npz(file: Path) -> None:
    """Raises ShoalError where an array of an npz file claims more than follows its header. Raises BadZipFile, OSError and ValueError."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > allowed_bytes(file.stat().st_size):
            raise grows_too_much(file, allowed_bytes(file.stat().st_size))
        for member in members:
            with archive.open(member) as content:
                _check_array(content, f"{file} ({member.filename})", member.file_size)


def _check_array(content: IO[bytes], where: str, size: int) -> None:
    version = npy.read_magic(content)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(content)
    if np.dtype(dtype).hasobject:
        raise ValueError("its array is pickled, and nothing pickled is read")
    claimed = math.prod(shape) * np.dtype(dtype).itemsize
    if claimed < 0 or content.tell() + claimed != size:
        raise ShoalError(f"{where} is damaged: its header says {claimed:,} bytes, and {size - content.tell():,} follow it")
