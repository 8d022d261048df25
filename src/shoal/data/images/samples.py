"""Images as samples: in one tensor where they fit, else decoded when asked for.

Shapes: N samples, B of a batch, C channels, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config import Run
from shoal.data.images.decoding import resize
from shoal.data.interfaces import Batch, Indices, SelectableSamples, as_index
from shoal.data.loaded_data import Data, Info
from shoal.data.splits import counts, divided, some_of
from shoal.errors import ShoalError

Pixels = NDArray[np.uint8]
_FLOAT_BYTES = 256 * 2**20


class Target(NamedTuple):
    """What the model wants images to be like; None: as they are."""

    size: int | None = None
    channels: int | None = None

    @classmethod
    def of(cls, run: Run) -> Target:
        return cls(getattr(run.model, "image_size", None), getattr(run.model, "channels", None))

    def fits(self, channels: int, height: int, width: int) -> bool:
        return self.channels in (None, channels) and (self.size is None or height == width == self.size)


class TensorImages(SelectableSamples):
    """Images in one tensor: float32 where that is small enough, so that a batch is one index_select; else uint8."""

    def __init__(self, images_NCHW: torch.Tensor, labels_N: torch.Tensor | None) -> None:
        self.images_NCHW = images_NCHW
        self.labels_N = labels_N

    def __len__(self) -> int:
        return len(self.images_NCHW)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        image = self.images_NCHW.index_select(0, index)
        batch = {"image": image if image.dtype == torch.float32 else image.to(torch.float32).div_(255)}
        if self.labels_N is not None:
            batch["label"] = self.labels_N.index_select(0, index)
        return batch

    def select(self, indices: torch.Tensor) -> Self:
        return type(self)(self.images_NCHW[indices], None if self.labels_N is None else self.labels_N[indices])


class LazyImages(SelectableSamples):
    """Images decoded when they are asked for. `read(i)` gives the pixels of one."""

    def __init__(self, read: Callable[[int], Pixels], numbers_N: torch.Tensor, labels_N: torch.Tensor | None) -> None:
        self._read = read
        self._numbers_N = numbers_N
        self.labels_N = labels_N

    def __len__(self) -> int:
        return len(self._numbers_N)

    def batch(self, indices: Indices) -> Batch:
        index = as_index(indices)
        pixels = np.stack([self._read(number) for number in self._numbers_N[index].tolist()])
        batch = {"image": torch.from_numpy(pixels).to(torch.float32).div_(255)}
        if self.labels_N is not None:
            batch["label"] = self.labels_N.index_select(0, index)
        return batch

    def select(self, indices: torch.Tensor) -> Self:
        return type(self)(self._read, self._numbers_N[indices], None if self.labels_N is None else self.labels_N[indices])


def from_pixels(pixels_NCHW: Pixels, labels: NDArray[np.int64] | None, target: Target) -> TensorImages:
    """Images that are in memory, brought to the size and colours the model wants."""
    if not target.fits(*pixels_NCHW.shape[1:]):
        size = target.size or min(pixels_NCHW.shape[2:])
        channels = target.channels or pixels_NCHW.shape[1]
        pixels_NCHW = np.stack([resize(pixels_CHW, size, channels) for pixels_CHW in pixels_NCHW])
    images = torch.from_numpy(np.require(pixels_NCHW, requirements=["C", "W"]))
    if images.numel() * 4 <= _FLOAT_BYTES:
        images = images.to(torch.float32).div_(255)
    return TensorImages(images, None if labels is None else torch.from_numpy(labels))


def image_data(
    run: Run, name: str, train: SelectableSamples, held_out: SelectableSamples | None, shape: tuple[int, int, int], num_classes: int | None
) -> Data:
    """Hold samples out if the source has no held-out part, keep as many as the settings allow, and describe the result."""
    if run.chosen_task.needs == "labels" and num_classes is None:
        raise ShoalError(f"{name}: images to be told apart need labels: put those of each class in a sub-folder with its name")
    if held_out is None:
        train, held_out = divided(train, run.seed)
    train_count, eval_count = counts(run.data, len(train), len(held_out) if held_out else 0)
    train = some_of(train, train_count, run.seed)
    held_out = some_of(held_out, eval_count, run.seed) if held_out and eval_count else None
    channels, height, width = shape
    colours = "" if channels == 1 else " in colour"
    described = f"{name}: {len(train):,} training images of {height} × {width}{colours}"
    return Data(train, held_out, Info("image", described, image_shape=shape, num_classes=num_classes))
