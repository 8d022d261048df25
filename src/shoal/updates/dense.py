"""Codecs that send every number: as it is, as a 16-bit float, or as an 8-bit integer with a scale per chunk.

Each is a pair of `pack` and `unpack` of one block; blocks begin at whole chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.updates.blocks import Floats, scratch
from shoal.updates.frames import Frame, Frames, UpdateError, expect_frames, frame_of, values_of

CHUNK = 1024
"""Numbers that share a scale: its four bytes are 0.4 % of the chunk."""
_LARGEST_HALF = 65504.0
_LARGEST_SCALE = np.float32(2.6e36)
"""127 times this is still a 32-bit float."""
_SMALLEST_PEAK = np.float32(1e-36)
"""Below this 127 / peak is no 32-bit float any more; such a chunk is sent as zeros."""


class Dense(Protocol):
    """An encoded vector that can be written and read block by block."""

    @classmethod
    def empty(cls, size: int) -> Self: ...

    @classmethod
    def read(cls, size: int, frames: Sequence[Frame]) -> Self: ...

    def pack(self, block: Floats, start: int, end: int) -> None: ...

    def unpack(self, start: int, end: int, out: Floats) -> None: ...

    def frames(self) -> Frames: ...


class Plain:
    """32-bit floats."""

    def __init__(self, values: Floats) -> None:
        self.values = values

    @classmethod
    def empty(cls, size: int) -> Self:
        return cls(np.empty(size, np.float32))

    @classmethod
    def read(cls, size: int, frames: Sequence[Frame]) -> Self:
        expect_frames(len(frames), 1)
        return cls(values_of(frames[0], "<f4", size, "32-bit floats"))

    def pack(self, block: Floats, start: int, end: int) -> None:
        self.values[start:end] = block

    def unpack(self, start: int, end: int, out: Floats) -> None:
        out[:] = self.values[start:end]

    def frames(self) -> Frames:
        return (frame_of(self.values),)


class Half:
    """16-bit floats; what is too large for them becomes the largest."""

    def __init__(self, values: NDArray[np.float16]) -> None:
        self.values = values

    @classmethod
    def empty(cls, size: int) -> Self:
        return cls(np.empty(size, np.float16))

    @classmethod
    def read(cls, size: int, frames: Sequence[Frame]) -> Self:
        expect_frames(len(frames), 1)
        return cls(values_of(frames[0], "<f2", size, "16-bit floats"))

    def pack(self, block: Floats, start: int, end: int) -> None:
        limited = torch.from_numpy(scratch(end - start))
        torch.clamp(torch.from_numpy(block), -_LARGEST_HALF, _LARGEST_HALF, out=limited)
        torch.from_numpy(self.values[start:end]).copy_(limited)

    def unpack(self, start: int, end: int, out: Floats) -> None:
        block = self.values[start:end]
        if not block.flags.writeable:
            block = block.copy()  # torch takes no array that may not be written to
        torch.from_numpy(out).copy_(torch.from_numpy(block))

    def frames(self) -> Frames:
        return (frame_of(self.values),)


class Bytes:
    """8-bit integers from −127 to 127, times the scale of their chunk."""

    def __init__(self, scales: Floats, values: NDArray[np.int8]) -> None:
        self.scales, self.values = scales, values

    @classmethod
    def empty(cls, size: int) -> Self:
        return cls(np.empty(chunks(size), np.float32), np.empty(size, np.int8))

    @classmethod
    def read(cls, size: int, frames: Sequence[Frame]) -> Self:
        expect_frames(len(frames), 2)
        scales = values_of(frames[0], "<f4", chunks(size), "scales")
        if not ((scales >= 0) & (scales <= _LARGEST_SCALE)).all():
            raise UpdateError("scales: a number that is no scale")
        return cls(scales, values_of(frames[1], "i1", size, "8-bit integers"))

    def pack(self, block: Floats, start: int, end: int) -> None:
        rounded = scratch(end - start)
        with np.errstate(invalid="ignore"):
            for rows, scaled, scales in zip(_rows(block), _rows(rounded), self._scales(start, end), strict=True):
                _round(rows, scaled, scales)
            np.copyto(self.values[start:end], rounded, casting="unsafe")

    def unpack(self, start: int, end: int, out: Floats) -> None:
        out[:] = self.values[start:end]
        for rows, scales in zip(_rows(out), self._scales(start, end), strict=True):
            rows *= scales[:, None]

    def frames(self) -> Frames:
        return frame_of(self.scales), frame_of(self.values)

    def _scales(self, start: int, end: int) -> list[Floats]:
        """The scales of the whole chunks, and that of a last one that is shorter."""
        first, whole, last = start // CHUNK, end // CHUNK, chunks(end)
        return [part for part in (self.scales[first:whole], self.scales[whole:last]) if len(part)]


def _round(rows: Floats, scaled: Floats, scales: Floats) -> None:
    """Whole numbers from −127 to 127 into `scaled`, for each row with its scale. A peak that is not finite becomes the scale: refused."""
    peaks: Floats = np.abs(rows, out=scaled).max(1)
    scales[:] = np.where(peaks < _SMALLEST_PEAK, 0, np.where(peaks < np.inf, np.minimum(peaks / 127, _LARGEST_SCALE), peaks))
    factors = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks >= _SMALLEST_PEAK)
    np.multiply(rows, factors[:, None], out=scaled)
    np.rint(scaled, out=scaled)


def chunks(size: int) -> int:
    return -(-size // CHUNK)


def _rows(block: NDArray[Any]) -> Iterator[Floats]:
    """The whole chunks as rows of one matrix, and a last one that is shorter as another. They share the block's memory."""
    whole = len(block) // CHUNK * CHUNK
    if whole:
        yield block[:whole].reshape(-1, CHUNK)
    if whole < len(block):
        yield block[whole:].reshape(1, -1)
