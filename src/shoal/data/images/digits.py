"""Handwritten digits that come with scikit-learn: real images that need no download."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config import Run
from shoal.data.images.samples import Target, TensorImages, from_pixels, image_data
from shoal.data.loaded_data import Data
from shoal.data.packages import import_optional
from shoal.data.splits import share_out


def load_digits(run: Run) -> Data:
    """1,797 digits of 8 × 8 from the UCI archive. A fifth of each class is held out."""
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


@functools.cache
def _digits() -> NDArray[np.uint8]:
    """A row of 64 pixels (0 to 16) and a label for each digit. Reading scikit-learn's file is faster than importing scikit-learn."""
    found = importlib.util.find_spec("sklearn")
    file = Path(*(found.submodule_search_locations or [])[:1], "datasets", "data", "digits.csv.gz") if found else None
    if file is not None and file.is_file():
        return np.loadtxt(file, delimiter=",", dtype=np.uint8)
    digits = import_optional("sklearn.datasets").load_digits()
    return np.concatenate([digits.data, digits.target[:, None]], axis=1).astype(np.uint8)


def _stratified(labels: NDArray[np.int64], seed: int) -> NDArray[np.bool_]:
    """A mask of the held-out samples: a fifth of every class."""
    classes = np.bincount(labels)
    held = np.zeros(len(labels), np.bool_)
    for label, count in enumerate(share_out(-(-len(labels) // 5), classes / len(labels))):
        held[np.random.default_rng([seed, label]).permutation(np.flatnonzero(labels == label))[:count]] = True
    return held
