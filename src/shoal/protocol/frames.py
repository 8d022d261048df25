"""Arrays as frames of bytes, little-endian on every machine, and arrays from frames whose length must be right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import ShoalError
from shoal.protocol.messages import Frame

__all__ = ["Frame", "Frames", "UpdateError", "expect_frames", "frame_of", "values_of"]

Frames = tuple[memoryview, ...]
"""What a codec makes: views of contiguous arrays."""


class UpdateError(ShoalError):
    """A malformed update, which is refused as a whole."""


def frame_of(values: NDArray[Any]) -> memoryview:
    """The bytes of an array; they share its memory where the machine is little-endian already."""
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8).data


def values_of(frame: Frame, dtype: str, count: int, what: str) -> NDArray[Any]:
    """The array in a frame, which must hold `count` numbers of `dtype`; no copy, and not to be written to."""
    kind = np.dtype(dtype)
    present, needed = memoryview(frame).nbytes, count * kind.itemsize
    if present != needed:
        raise UpdateError(f"{what}: {present} bytes where {needed} are needed")
    return np.frombuffer(frame, kind) if needed else np.empty(0, kind)


def expect_frames(present: int, needed: int) -> None:
    if present != needed:
        raise UpdateError(f"an update of {needed} frame{'s' * (needed > 1)} came with {present}")
