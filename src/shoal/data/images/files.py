"""Images in a folder, a zip file or an npz file: classes by sub-folder, splits by name, CelebA's partition."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.images.decoding import SUFFIXES, CorruptImageError, decode, is_grey
from shoal.data.images.samples import LazyImages, Pixels, Target, TensorImages, from_pixels
from shoal.data.splits import split_of
from shoal.errors import ShoalError
from shoal.files import read_file
from shoal.untrusted.data_files import MOST_MEMBER_BYTES, read_member

LAZY_BYTES = 10**9
_LISTED = 5
_HEADERS = 1000
PARTITION = "list_eval_partition.txt"


ImageSamples = TensorImages | LazyImages


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        found = [Path(folder, name) for folder, _, names in os.walk(self.path) for name in names]
        return [file.relative_to(self.path).as_posix() for file in found]

    def read(self, name: str) -> bytes:
        return read_file(self.path / name, MOST_MEMBER_BYTES) or b""


class ZipFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: tuple[int, zipfile.ZipFile] | None = None

    def names(self) -> list[str]:
        return [name for name in self._file().namelist() if not name.endswith("/")]

    def read(self, name: str) -> bytes:
        return read_member(self._file(), name)

    def _file(self) -> zipfile.ZipFile:
        """The zip file, opened once per process: processes that share an open file move each other's position in it."""
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = os.getpid(), zipfile.ZipFile(self.path)
            except (zipfile.BadZipFile, OSError) as error:
                raise ShoalError(f"{self.path} is not a zip file that can be read: {error}") from error
        return self._opened[1]

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "_opened": None}


ImageStore = Folder | ZipFile
"""A collection of image files."""


class ImageLayout(NamedTuple):
    """The names of the training images and the held-out images of a store."""

    train: list[str]
    held_out: list[str]
    depth: int = 0
    """Index of the path component that is the class: 0, or 1 below folders such as train and test."""
    classes: tuple[str, ...] = ()
    """Sorted names of the classes; empty: there are no labels."""

    def labels(self, names: Sequence[str]) -> NDArray[np.int64] | None:
        if not self.classes:
            return None
        number = {name: label for label, name in enumerate(self.classes)}
        return np.asarray([number[PurePosixPath(name).parts[self.depth]] for name in names], np.int64)


def find_images(store: ImageStore) -> ImageLayout:
    """The images of a store in the order of their names, split and labelled by its folders."""
    everything = store.names()
    names = sorted(name for name in everything if _is_image(name))
    if not names:
        raise ShoalError(f"there are no images in {store.path} ({', '.join(SUFFIXES)})")
    splits = [split_of(PurePosixPath(name).parts[0]) if "/" in name else None for name in names]
    by_folder = set(splits) == {"train", "held-out"}
    in_folder = {name for name, split in zip(names, splits, strict=True) if split == "held-out"}
    held_names = in_folder if by_folder else _partition(store, everything)
    held_out = [name for name in names if name in held_names or PurePosixPath(name).name in held_names]
    excluded = set(held_out)
    return _labelled(ImageLayout([name for name in names if name not in excluded], held_out, depth=int(by_folder)))


def _labelled(layout: ImageLayout) -> ImageLayout:
    """Add the names of the classes, if all images are in sub-folders and there are at least two of these."""
    parts = [PurePosixPath(name).parts for name in layout.train + layout.held_out]
    classes = {folders[layout.depth] for folders in parts if len(folders) > layout.depth + 1}
    everywhere = all(len(folders) > layout.depth + 1 for folders in parts)
    return layout._replace(classes=tuple(sorted(classes))) if everywhere and len(classes) > 1 else layout


def _is_image(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return name.lower().endswith(SUFFIXES) and not any(part.startswith((".", "__MACOSX")) for part in parts)


def _partition(store: ImageStore, everything: Sequence[str]) -> set[str]:
    """The files that CelebA's partition file assigns to validation (1) and test (2); empty without such a file."""
    inside = next((name for name in everything if PurePosixPath(name).name == PARTITION), None)
    next_to_store = store.path.parent / PARTITION
    if inside is None and not next_to_store.is_file():
        return set()
    content = store.read(inside) if inside else read_file(next_to_store) or b""
    lines = content.decode("utf-8", "replace").split("\n")
    return {words[0] for words in map(str.split, lines) if len(words) == 2 and words[1] in ("1", "2")}


class Decoder:
    """Reads and decodes images of a store, by number. Each must have the shape of the first."""

    def __init__(self, store: ImageStore, names: Sequence[str], target: Target, shape: tuple[int, ...] | None = None) -> None:
        self._store, self._names, self._target = store, list(names), target
        self.shape = shape or self(0).shape

    def __call__(self, number: int) -> Pixels:
        file = self._store.path / self._names[number]
        try:
            pixels = decode(self._store.read(self._names[number]), self._target.size, self._target.channels)
        except (CorruptImageError, OSError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise CorruptImageError(f"{file} is not an image that can be read: {error}") from error
        if pixels.shape != getattr(self, "shape", pixels.shape):
            sizes = " and ".join(" × ".join(map(str, shape[1:])) for shape in (pixels.shape, self.shape))
            raise CorruptImageError(f"{file}: images have different sizes, {sizes}: bring them to one size (dcgan models resize images)")
        return pixels


def image_samples(
    store: ImageStore, layout: ImageLayout, names: Sequence[str], target: Target, like: tuple[int, ...] | None = None
) -> ImageSamples:
    """The images in memory; above a gigabyte, they are decoded when a batch is made. `like`: the shape that they must have."""
    labels = layout.labels(names)
    target = target._replace(channels=like[0] if like else target.channels or _channels(store, names))
    decoder = Decoder(store, names, target, like)
    if math.prod(decoder.shape) * len(names) > LAZY_BYTES:
        return LazyImages(decoder, torch.arange(len(names)), None if labels is None else torch.from_numpy(labels))
    return from_pixels(_decode_all(decoder, len(names)), labels, target)


def _channels(store: ImageStore, names: Sequence[str]) -> int:
    """1 if all images are grey, else 3. Of many images only some are opened."""
    some = names[:: -(-len(names) // _HEADERS)]

    def grey(name: str) -> bool:
        try:
            return is_grey(store.read(name))
        except Exception:  # decoding reports the damaged image by its name
            return True

    return 1 if all(grey(name) for name in some) else 3


def _decode_all(decoder: Decoder, count: int) -> Pixels:
    def attempt(number: int) -> Pixels | str:
        try:
            return decoder(number)
        except CorruptImageError as error:
            return str(error)

    with ThreadPoolExecutor() as threads:
        results = list(threads.map(attempt, range(count)))
    corrupt = [result for result in results if isinstance(result, str)]
    if corrupt:
        more = f"\nand {len(corrupt) - _LISTED:,} more" if len(corrupt) > _LISTED else ""
        raise ShoalError("\n".join(corrupt[:_LISTED]) + f"{more}\nReplace or remove {'it' if len(corrupt) == 1 else 'them'}.")
    return np.stack([result for result in results if not isinstance(result, str)])
