"""Transfer of images to workers that have none, in chunks of one file.

Chunk 0 lists the digests of the others, and its own digest is part of the run's description, so every chunk is checked before it is
written. A folder is sent as a zip file, which is read like the folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shoal.config import Run
from shoal.config.schema.data import Images
from shoal.data.images.files import PARTITION
from shoal.data.images.source import find_existing
from shoal.data.interfaces import Progress
from shoal.errors import ShoalError

CHUNK_BYTES = 4 << 20
_DIGEST_BYTES = 32
_MOST_CHUNKS = 1 << 20
_SPARE_BYTES = 256 << 20
"""Bytes that stay free on a worker's disk."""
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)
"""Date of every file in a zip file, so that the same images have the same digest."""


class ImageOffer(NamedTuple):
    """The description of a file of images that can be fetched."""

    digest: str
    """SHA-256 of chunk 0, the list of digests."""
    chunks: int
    total_bytes: int
    suffix: str

    @classmethod
    def of(cls, fields: Any) -> ImageOffer:
        """Check an offer that came from the coordinator. Raises ShoalError."""
        try:
            digest, count, size, suffix = fields
        except (TypeError, ValueError):
            raise ShoalError("the coordinator offers images in a format that this version of Shoal does not know") from None
        good = isinstance(digest, str) and isinstance(count, int) and isinstance(size, int) and suffix in (".zip", ".npz")
        if not good or not 0 < count <= _MOST_CHUNKS or not (count - 1) * CHUNK_BYTES < size <= count * CHUNK_BYTES:
            raise ShoalError("the coordinator offers images with invalid sizes or names: join again, or put the images in place")
        return cls(digest, count, size, suffix)


def images_to_serve(run: Run) -> Path | None:
    """The path of the images, if the settings say that workers fetch them (`data.source.serve`)."""
    source = run.data.source
    return find_existing(Path(source.path).expanduser()) if isinstance(source, Images) and source.serve else None


def is_without_images(run: Run) -> bool:
    """Whether the images of the settings are missing on this machine."""
    source = run.data.source
    return isinstance(source, Images) and find_existing(Path(source.path).expanduser()) is None


def image_chunks(path: Path) -> Iterator[bytes]:
    """The chunks of a file, or of a folder as a zip file."""
    if path.is_dir():
        yield from _folder_chunks(path)
        return
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


class _Stream(io.RawIOBase):
    """A write-only file without seek, from which the written bytes are taken in chunks."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._buffer += content
        return len(content)

    def chunks(self, least: int) -> Iterator[bytes]:
        while len(self._buffer) >= least and self._buffer:
            chunk = bytes(self._buffer[:CHUNK_BYTES])
            del self._buffer[:CHUNK_BYTES]
            yield chunk


def _folder_chunks(folder: Path) -> Iterator[bytes]:
    stream, partition = _Stream(), folder.parent / PARTITION
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if partition.is_file():
        files.setdefault(PARTITION, partition)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, path in files.items():
            archive.writestr(zipfile.ZipInfo(name, _FIXED_DATE), path.read_bytes())
            yield from stream.chunks(CHUNK_BYTES)
    yield from stream.chunks(1)


def publish_images(chunks: Iterator[bytes], suffix: str, put: Callable[[int, bytes], None]) -> ImageOffer:
    """Call `put` with each chunk, numbered from 1, and last with the list of their digests as number 0."""
    digests, size = bytearray(), 0
    for number, chunk in enumerate(chunks, 1):
        put(number, chunk)
        digests += hashlib.sha256(chunk).digest()
        size += len(chunk)
    put(0, bytes(digests))
    return ImageOffer(hashlib.sha256(digests).hexdigest(), len(digests) // _DIGEST_BYTES, size, suffix)


def fetch_images(offer: ImageOffer, get: Callable[[int], bytes | None], folder: Path, progress: Progress | None) -> Path:
    """The path of the complete file. It is fetched unless it is already there. Raises ShoalError."""
    file = folder / f"{offer.digest[:32]}{offer.suffix}"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    if offer.chunks * CHUNK_BYTES > (free := shutil.disk_usage(folder).free) - _SPARE_BYTES:
        needed = f"the class's images are {offer.total_bytes >> 20:,} MiB"
        raise ShoalError(f"{needed}, and {folder} has {free >> 20:,} MiB free: make room there")
    digests = _checked(get(0), offer.digest, offer.chunks * _DIGEST_BYTES)
    if len(digests) != offer.chunks * _DIGEST_BYTES:
        raise ShoalError("the list of the class's images is not the one announced: join again")
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("wb") as output:
            for number in range(1, offer.chunks + 1):
                expected = digests[(number - 1) * _DIGEST_BYTES : number * _DIGEST_BYTES].hex()
                output.write(_checked(get(number), expected, CHUNK_BYTES))
                if progress is not None:
                    progress("the class's images", min(number * CHUNK_BYTES, offer.total_bytes), offer.total_bytes)
        os.replace(partial, file)
    except OSError as error:
        raise ShoalError(f"the class's images cannot be written to {folder}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return file


def _checked(chunk: bytes | None, digest: str, most: int) -> bytes:
    if chunk is None or len(chunk) > most or hashlib.sha256(chunk).hexdigest() != digest:
        raise ShoalError("a piece of the class's images is missing or was changed on its way: join again, or put the images in place")
    return chunk
