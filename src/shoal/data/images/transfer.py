"""Images in pieces, for workers that have none: what one machine has, byte by byte, put together again on another.

The first piece lists the digests of the others, and its own digest comes with the run's description; so every piece is checked before it is
written. A folder travels as a zip file, which is read like the folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shoal.config import Run
from shoal.config.schema.data import Images
from shoal.data.images.source import present
from shoal.data.interfaces import Progress
from shoal.errors import ShoalError

PIECE_BYTES = 4 << 20
_DIGEST_BYTES = 32
_CHOSEN_DATE = (1980, 1, 1, 0, 0, 0)
_PARTITION = "list_eval_partition.txt"


class ImageOffer(NamedTuple):
    """What is known of pieces before they are there."""

    digest: str
    """Of the list of digests."""
    pieces: int
    total_bytes: int
    suffix: str

    @classmethod
    def of(cls, told: Any) -> ImageOffer:
        try:
            digest, count, size, suffix = told
        except (TypeError, ValueError):
            raise ShoalError("the coordinator offers images in a way that this version of Shoal does not know") from None
        good = isinstance(digest, str) and isinstance(count, int) and isinstance(size, int) and suffix in (".zip", ".npz")
        if not good or not 0 < count <= 1 << 20 or not 0 < size <= count * PIECE_BYTES:
            raise ShoalError("the coordinator offers images that cannot be: join again, or put the images in place")
        return cls(digest, count, size, suffix)


def images_to_serve(run: Run) -> Path | None:
    """The images of a run whose settings say that others get them."""
    source = run.data.source
    return present(Path(source.path).expanduser()) if isinstance(source, Images) and source.serve else None


def is_without_images(run: Run) -> bool:
    """Whether the images that the settings name are not on this machine."""
    source = run.data.source
    return isinstance(source, Images) and present(Path(source.path).expanduser()) is None


def image_chunks(path: Path) -> Iterator[bytes]:
    """A file, or a folder as a zip file, in pieces."""
    return _cut_folder(path) if path.is_dir() else _cut_file(path)


def _cut_file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


class _Stream(io.RawIOBase):
    """Takes what a zip file consists of, and never goes back."""

    def __init__(self) -> None:
        self.waiting = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.waiting += content
        return len(content)

    def pieces(self, least: int) -> Iterator[bytes]:
        while len(self.waiting) >= least and self.waiting:
            piece = bytes(self.waiting[:PIECE_BYTES])
            del self.waiting[:PIECE_BYTES]
            yield piece


def _cut_folder(folder: Path) -> Iterator[bytes]:
    stream, beside = _Stream(), folder.parent / _PARTITION
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if beside.is_file():
        files.setdefault(_PARTITION, beside)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as made:
        for name, path in files.items():
            made.writestr(zipfile.ZipInfo(name, _CHOSEN_DATE), path.read_bytes())
            yield from stream.pieces(PIECE_BYTES)
    yield from stream.pieces(1)


def publish_images(pieces: Iterator[bytes], suffix: str, put: Callable[[int, bytes], None]) -> ImageOffer:
    """Hand over pieces, numbered from 1, and last the list of their digests with number 0."""
    digests, size = bytearray(), 0
    for number, piece in enumerate(pieces, 1):
        put(number, piece)
        digests += hashlib.sha256(piece).digest()
        size += len(piece)
    put(0, bytes(digests))
    return ImageOffer(hashlib.sha256(digests).hexdigest(), len(digests) // _DIGEST_BYTES, size, suffix)


def fetch_images(offer: ImageOffer, get: Callable[[int], bytes | None], folder: Path, progress: Progress | None) -> Path:
    """The file that the pieces make, whole and checked; from an earlier time where it is there. Raises ShoalError."""
    file = folder / f"{offer.digest[:32]}{offer.suffix}"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    digests = _checked(get(0), offer.digest)
    if len(digests) != offer.pieces * _DIGEST_BYTES:
        raise ShoalError("the list of the class's images is not the one announced: join again")
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("wb") as written:
            for number in range(1, offer.pieces + 1):
                wanted = digests[(number - 1) * _DIGEST_BYTES : number * _DIGEST_BYTES].hex()
                written.write(_checked(get(number), wanted))
                if progress is not None:
                    progress("the class's images", min(number * PIECE_BYTES, offer.total_bytes), offer.total_bytes)
        os.replace(partial, file)
    except OSError as error:
        raise ShoalError(f"the class's images cannot be written to {folder}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return file


def _checked(piece: bytes | None, digest: str) -> bytes:
    if piece is None or hashlib.sha256(piece).hexdigest() != digest:
        raise ShoalError("a piece of the class's images is missing or was changed on its way: join again, or put the images in place")
    return piece
