"""Real data that comes with Python packages: handwritten digits, and the text of the standard library."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config import Run
from shoal.config.schema.data import Builtin
from shoal.data.documents import TextPart, Texts
from shoal.data.hub_dataset import Request
from shoal.data.images import Target, TensorImages, from_pixels, image_data
from shoal.data.interfaces import Data
from shoal.data.limits import share_out
from shoal.data.optional import need
from shoal.errors import ShoalError

_SOURCE_BYTES = 4_000_000
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "__phello__"}


def load_builtin(source: Builtin, run: Run, request: Request) -> Data | list[TextPart]:
    return load_digits(run) if source.name == "digits" else [python_source()]


def load_digits(run: Run) -> Data:
    """1,797 digits of 8 × 8 from the UCI archive, a fifth held out, of each class alike."""
    table = _digits()
    target = Target.of(run)
    pixels = table[:, :-1].reshape(-1, 1, 8, 8).astype(np.float32) / 16
    labels = table[:, -1].astype(np.int64)
    if target.fits(1, 8, 8):
        samples = TensorImages(torch.from_numpy(pixels), torch.from_numpy(labels))
    else:
        samples = from_pixels((pixels * 255).round().astype(np.uint8), labels, target)
    channels, height, width = samples.images_NCHW.shape[1:]
    held = _stratified(labels, run.seed)
    train, held_out = (samples.select(torch.from_numpy(np.flatnonzero(part))) for part in (~held, held))
    return image_data(run, "digits", train, held_out, (channels, height, width), 10)


def _digits() -> NDArray[np.uint8]:
    """A row of 64 pixels (0 to 16) and a label for each digit. Reading the file that scikit-learn brings is faster than importing it."""
    found = importlib.util.find_spec("sklearn")
    file = Path(*(found.submodule_search_locations or [])[:1], "datasets", "data", "digits.csv.gz") if found else None
    if file is not None and file.is_file():
        return np.loadtxt(file, delimiter=",", dtype=np.uint8)
    digits = need("sklearn.datasets").load_digits()
    return np.concatenate([digits.data, digits.target[:, None]], axis=1).astype(np.uint8)


def _stratified(labels: NDArray[np.int64], seed: int) -> NDArray[np.bool_]:
    """Which samples are held out: a fifth of all, of each class its share."""
    classes = np.bincount(labels)
    held = np.zeros(len(labels), np.bool_)
    for label, count in enumerate(share_out(-(-len(labels) // 5), classes / len(labels))):
        held[np.random.default_rng([seed, label]).permutation(np.flatnonzero(labels == label))[:count]] = True
    return held


def python_source() -> TextPart:
    """The .py files of the standard library of this Python, in the order of their paths, up to about 4 MB."""
    library = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    size = 0
    for file in sorted(_source_files(library), key=lambda file: file.relative_to(library).parts):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few modules declare another encoding
            continue
        size += len(text)
        if size > _SOURCE_BYTES:
            break
        if text:
            texts.append(text)
    if not texts:
        raise ShoalError(f"this Python has no source text of its standard library in {library}: choose another data.source")
    return TextPart("python-source", Texts(texts), None)


def _source_files(library: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _NOT_SOURCE]
        # Names that begin with _sysconfigdata say how this Python was built, not how it works.
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
