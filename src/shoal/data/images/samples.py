"""Images as samples: in one tensor if they fit in memory, else decoded when a batch is made.

Shapes: N samples, B of a batch, C channels, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config import Run
from shoal.data.images.decoding import resize
from shoal.data.interfaces import Batch, Indices, SelectableSamples, as_index
from shoal.data.loaded_data import Data, Info
from shoal.data.splits import split_and_limit
from shoal.errors import ShoalError

Pixels = NDArray[np.uint8]
_FLOAT_BYTES = 256 * 2**20
_AT_ONCE = 1024


class Target(NamedTuple):
    """The size and channels that the model needs; None: those of the images."""

    size: int | None = None
    channels: int | None = None

    @classmethod
    def of(cls, run: Run) -> Target:
        return cls(getattr(run.model, "image_size", None), getattr(run.model, "channels", None))

    def fits(self, channels: int, height: int, width: int) -> bool:
        return self.channels in (None, channels) and (self.size is None or height == width == self.size)


class _LabelledImages(SelectableSamples):
    """Images as a column of tensors [N, …], and their labels, if there are any."""

    def __init__(self, column_N: torch.Tensor, labels_N: torch.Tensor | None) -> None:
        self._column_N, self.labels_N = column_N, labels_N

    def __len__(self) -> int:
        return len(self._column_N)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        image = self._images(self._column_N.index_select(0, index))
        batch = {"image": image if image.dtype == torch.float32 else image.to(torch.float32).div_(255)}
        return batch if self.labels_N is None else batch | {"label": self.labels_N.index_select(0, index)}

    def select(self, indices: torch.Tensor) -> Self:
        selected = copy(self)
        selected._column_N = self._column_N[indices]
        selected.labels_N = None if self.labels_N is None else self.labels_N[indices]
        return selected

    def _images(self, column_B: torch.Tensor) -> torch.Tensor:
        """The images [B, C, H, W] of a batch, as float32 from 0 to 1 or as uint8."""
        return column_B


class TensorImages(_LabelledImages):
    """Images in one tensor: float32 where that is small enough, so that a batch is one index_select; else uint8."""

    @property
    def images_NCHW(self) -> torch.Tensor:
        return self._column_N


class LazyImages(_LabelledImages):
    """Images decoded when a batch is made. `read(i)` returns the pixels of one."""

    def __init__(self, read: Callable[[int], Pixels], numbers_N: torch.Tensor, labels_N: torch.Tensor | None) -> None:
        super().__init__(numbers_N, labels_N)
        self._read = read

    def _images(self, column_B: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.stack([self._read(number) for number in column_B.tolist()]))


def from_pixels(pixels_NCHW: Pixels, labels: NDArray[np.int64] | None, target: Target) -> TensorImages:
    """Images in memory, converted to the size and channels that the model needs."""
    if not target.fits(*pixels_NCHW.shape[1:]):
        size = target.size or min(pixels_NCHW.shape[2:])
        channels = target.channels or pixels_NCHW.shape[1]
        parts = (pixels_NCHW[start : start + _AT_ONCE] for start in range(0, len(pixels_NCHW), _AT_ONCE))
        pixels_NCHW = np.concatenate([resize(part_NCHW, size, channels) for part_NCHW in parts])
    images = torch.from_numpy(np.require(pixels_NCHW, requirements=["C", "W"]))
    if images.numel() * 4 <= _FLOAT_BYTES:
        images = images.to(torch.float32).div_(255)
    return TensorImages(images, None if labels is None else torch.from_numpy(labels))


def image_data(
    run: Run, name: str, train: SelectableSamples, held_out: SelectableSamples | None, shape: tuple[int, int, int], num_classes: int | None
) -> Data:
    """Hold samples out if the source has no held-out part, limit their numbers to the settings, and describe the result."""
    if run.chosen_task.needs == "labels" and num_classes is None:
        raise ShoalError(f"{name}: images to classify need labels: put those of each class in a sub-folder with its name")
    train, held_out = split_and_limit(run.data, run.seed, train, held_out)
    channels, height, width = shape
    colours = "" if channels == 1 else " in colour"
    described = f"{name}: {len(train):,} training images of {height} × {width}{colours}"
    return Data(train, held_out, Info("image", described, image_shape=shape, num_classes=num_classes))
