"""Files in MNIST's idx format: a big-endian header (magic number, one length per dimension), then bytes."""

from __future__ import annotations

import hashlib
import math
import struct
import urllib.error
import urllib.request
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.config import Run
from shoal.config.schema.data import Mnist
from shoal.data.hub.dataset import DataRequest
from shoal.data.images.samples import Target, from_pixels, image_data
from shoal.data.interfaces import Progress
from shoal.data.loaded_data import Data
from shoal.errors import ShoalError
from shoal.untrusted.data_files import open_data

# The four files, and the MD5 sums of their uncompressed contents as published.
FILES = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
ADDRESSES = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
CLASSES = 10
_IMAGES, _LABELS = 0x803, 0x801
_CHUNK_BYTES = 1 << 16
_TIMEOUT_S = 20.0


def load_mnist(source: Mnist, run: Run, request: DataRequest) -> Data:
    folder = Path(source.path).expanduser()
    files = {name: _find(folder, name, request.progress) for name in FILES}
    target = Target.of(run)
    train, held_out = (
        from_pixels(*_pair(files[f"{split}-images-idx3-ubyte"], files[f"{split}-labels-idx1-ubyte"]), target) for split in ("train", "t10k")
    )
    channels, height, width = train.images_NCHW.shape[1:]
    return image_data(run, folder.name, train, held_out, (channels, height, width), CLASSES)


def _find(folder: Path, name: str, progress: Progress | None) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    return _download(folder / f"{name}.gz", FILES[name], progress)


def _download(file: Path, checksum: str, progress: Progress | None) -> Path:
    """Download `file` from the first address that has it. The file appears only when it is whole and its contents have this checksum."""
    unfinished = file.with_name(file.name + ".part")
    reason: Exception | None = None
    for address in ADDRESSES:
        try:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            _copy(f"{address}/{file.name}", unfinished, file.name, progress)
            if hashlib.md5(_content(unfinished), usedforsecurity=False).hexdigest() != checksum:
                raise ShoalError(f"what was downloaded as {file.name} is not the file of that name: its checksum differs")
            return unfinished.replace(file)
        except (OSError, ShoalError) as error:  # URLError is an OSError
            reason = error
            unfinished.unlink(missing_ok=True)
    why = getattr(reason, "reason", reason)
    missing = f"put {', '.join(f'{name}.gz' for name in FILES)} (gzipped or not) in {file.parent}"
    raise ShoalError(f"{file} is not there and cannot be downloaded ({why}): {missing}")


def _copy(address: str, file: Path, what: str, progress: Progress | None) -> None:
    with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as response, file.open("wb") as output:
        length = response.headers.get("Content-Length")
        total = int(length) if length else None
        done = 0
        while chunk := response.read(_CHUNK_BYTES):
            output.write(chunk)
            done += len(chunk)
            if progress:
                progress(what, done, total)
    if total is not None and done != total:
        raise OSError(f"{done:,} of {total:,} bytes came")


def _pair(images: Path, labels: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    pixels, classes = read_idx(images, _IMAGES), read_idx(labels, _LABELS)
    if len(pixels) != len(classes):
        raise ShoalError(f"{images} holds {len(pixels):,} images and {labels} {len(classes):,} labels: they do not belong together")
    if classes.max() >= CLASSES:
        at = int(np.argmax(classes >= CLASSES))
        raise ShoalError(f"{labels}: label {at} is {classes[at]}, out of range: labels are 0 to {CLASSES - 1}")
    return pixels[:, None], classes.astype(np.int64)


def read_idx(file: Path, magic: int) -> NDArray[np.uint8]:
    """The array in an idx file of bytes."""
    content = _content(file)
    dimensions = magic & 0xFF
    header = 4 + 4 * dimensions
    if not content:
        raise ShoalError(f"{file} is empty")
    if len(content) < header or struct.unpack(">I", content[:4])[0] != magic:
        raise ShoalError(f"{file} is not an idx file of {dimensions} dimensions: it does not begin with {magic:#010x}")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        size = " × ".join(map(str, shape))
        raise ShoalError(f"{file} is truncated or damaged: its header says {size} bytes, and {len(content) - header:,} follow it")
    if not math.prod(shape):
        raise ShoalError(f"{file} holds no samples")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _content(file: Path) -> bytes:
    try:
        with open_data(file, compressed=False) as content:
            compressed = content.read(2) == b"\x1f\x8b"
        with open_data(file, compressed) as content:
            return content.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ShoalError(f"{file} is truncated or damaged: {error}") from error
