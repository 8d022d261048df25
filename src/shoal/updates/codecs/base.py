"""The interface of codecs, and codecs that work block by block.

Received frames are untrusted: their lengths must be exactly what the codec and the size say, and at most `size` numbers are allocated.
Values that are not finite are refused. What a codec loses may be kept and added to the next update (error feedback).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.frames import Frame, Frames, UpdateError, expect_frames, frame_of, values_of
from shoal.updates.parallel_blocks import BLOCK, Floats, all_finite, in_blocks, scratch


class Coder:
    """Encodes and decodes vectors. A subclass defines `pack`, `unpack` and `most_bytes`; the other methods follow from those, and may be
    overridden to be faster."""

    def pack(self, values: Floats) -> Frames:
        """The frames of finite numbers."""
        raise NotImplementedError  # abstract

    def unpack(self, size: int, frames: Sequence[Frame]) -> Floats:
        """The `size` numbers in the frames. Raises UpdateError where the frames are not exactly what `pack` makes."""
        raise NotImplementedError  # abstract

    def most_bytes(self, size: int) -> int:
        """Largest encoded size of `size` numbers, in bytes."""
        raise NotImplementedError  # abstract

    def encode(self, values: Floats, lost: Floats | None) -> Frames:
        """The frames of the values, which are not changed. `lost` (the residual) is added first, and becomes what the codec lost."""
        if lost is None:
            return self.pack(values)
        lost += values
        frames = self.pack(lost)
        lost -= self.unpack(len(values), frames)
        return frames

    def decode(self, size: int, frames: Sequence[Frame], out: Floats) -> None:
        """Decode into `out`, whose content is undefined after an error."""
        found = self.unpack(size, frames)
        expect_finite(found)
        out[:] = found

    def add(self, size: int, frames: Sequence[Frame], target: Floats, scale: float, own: bool) -> None:
        """`target += scale × decoded`. An error leaves the target unchanged. `own`: frames of this process, which need no check."""
        found = self.unpack(size, frames)
        if not own:
            expect_finite(found)
        target += found * np.float32(scale)

    def borrow(self, size: int, frames: Sequence[Frame]) -> Floats | None:
        """The numbers as a read-only view of the frames; None where a view is not possible."""
        return None


class PackedVector(ABC):
    """An encoded vector that can be written and read block by block. Blocks begin at whole chunks."""

    dtype: str
    """The type of the values in the frame."""
    noun: str
    """Name of the values in messages."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values

    @classmethod
    def length(cls, size: int) -> int:
        """The number of values in the frame of a vector of `size` numbers."""
        return size

    @classmethod
    def empty(cls, size: int) -> Self:
        return cls(np.empty(cls.length(size), cls.dtype))

    @classmethod
    def read(cls, size: int, frames: Sequence[Frame]) -> Self:
        expect_frames(len(frames), 1)
        return cls(values_of(frames[0], cls.dtype, cls.length(size), cls.noun))

    def frames(self) -> Frames:
        return (frame_of(self.values),)

    @abstractmethod
    def pack(self, block: Floats, start: int, end: int) -> None: ...

    @abstractmethod
    def unpack(self, start: int, end: int, out: Floats) -> None: ...


class BlockwiseCoder(Coder):
    """A codec that sends every number. It works on several blocks at once, each of which fits a core's cache."""

    def __init__(self, vector: type[PackedVector]) -> None:
        self.vector = vector

    def encode(self, values: Floats, lost: Floats | None) -> Frames:
        packed = self.vector.empty(len(values))
        in_blocks(len(values), lambda start, end: _pack(packed, values, lost, start, end))
        return packed.frames()

    def decode(self, size: int, frames: Sequence[Frame], out: Floats) -> None:
        packed = self.vector.read(size, frames)
        in_blocks(size, lambda start, end: _unpack(packed, out[start:end], start, end))

    def add(self, size: int, frames: Sequence[Frame], target: Floats, scale: float, own: bool) -> None:
        packed = self.vector.read(size, frames)
        if not own:  # everything is checked before anything is added
            in_blocks(size, lambda start, end: _unpack(packed, scratch(end - start), start, end))
        in_blocks(size, lambda start, end: _add(packed, target[start:end], scale, start, end))

    def most_bytes(self, size: int) -> int:
        """Counted by blocks, which end at whole chunks: the vector that is asked about may be larger than memory."""
        whole, rest = divmod(size, BLOCK)
        return whole * self._bytes_of(BLOCK) + self._bytes_of(rest)

    def _bytes_of(self, size: int) -> int:
        return sum(frame.nbytes for frame in self.vector.empty(size).frames())


def expect_finite(block: Floats) -> None:
    if not all_finite(block):
        raise UpdateError("values: a number that is not finite")


def _pack(packed: PackedVector, values: Floats, lost: Floats | None, start: int, end: int) -> None:
    if lost is None:
        return packed.pack(values[start:end], start, end)
    wanted = lost[start:end]
    wanted += values[start:end]
    packed.pack(wanted, start, end)
    sent = scratch(end - start)
    packed.unpack(start, end, sent)
    wanted -= sent


def _unpack(packed: PackedVector, out: Floats, start: int, end: int) -> None:
    packed.unpack(start, end, out)
    expect_finite(out)


def _add(packed: PackedVector, target: Floats, scale: float, start: int, end: int) -> None:
    block = scratch(end - start)
    packed.unpack(start, end, block)
    block *= scale
    target += block
