"""Dense codecs: every number as float32, float16, or an 8-bit, 4-bit or ternary integer with a scale per chunk."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.config.schema.updates import Codec
from shoal.protocol.frames import Frame, Frames, UpdateError, expect_frames, frame_of, values_of
from shoal.updates.codecs.base import BlockwiseCoder, Coder, PackedVector, expect_finite
from shoal.updates.parallel_blocks import Floats, in_blocks, scratch

_LARGEST_HALF = 65504.0
_SMALLEST_PEAK = np.float32(1e-36)
"""Below this peak, levels / peak overflows float32; such a chunk is sent as zeros."""

_NUMPY_CONVERTS_FASTER = platform.machine().lower() in ("aarch64", "arm64")
_ROUNDING = np.float32(3 << 22)
"""A float of this size has no fraction bits: adding it rounds a small number, to even as `rint` does, into the lowest byte. That and the
copy of the byte take three quarters of the time of rounding and converting."""

_PER_BYTE = 5
"""Ternary numbers in a byte, since 3⁵ < 256."""
_STEP = np.float32(1.22)
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)
_TABLE: Floats = (np.arange(256)[:, None] // _POWERS % 3 - 1).astype(np.float32)
"""The five ternary numbers of every byte."""


def blockwise(codec: Codec) -> Coder:
    vectors: dict[str, type[PackedVector]] = {"fp16": Float16Vector, "int8": Int8Vector, "int4": Int4Vector, "ternary": TernaryVector}
    return BlockwiseCoder(vectors[codec.kind])


class PlainCoder(BlockwiseCoder):
    """The identity codec: the frame is the vector's own memory, and can be read as a view."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(Float32Vector)

    def encode(self, values: Floats, lost: Floats | None) -> Frames:
        return (frame_of(values),) if lost is None else super().encode(values, lost)

    def borrow(self, size: int, frames: Sequence[Frame]) -> Floats | None:
        values = Float32Vector.read(size, frames).values
        if not (values.flags.writeable and values.flags.aligned and values.dtype.isnative):  # torch takes no other
            return None
        in_blocks(size, lambda start, end: expect_finite(values[start:end]))
        return values


class Float32Vector(PackedVector):
    """32-bit floats."""

    dtype, noun = "<f4", "32-bit floats"

    def pack(self, block: Floats, start: int, end: int) -> None:
        self.values[start:end] = block

    def unpack(self, start: int, end: int, out: Floats) -> None:
        out[:] = self.values[start:end]


class Float16Vector(PackedVector):
    """16-bit floats, saturated."""

    dtype, noun = "<f2", "16-bit floats"

    def pack(self, block: Floats, start: int, end: int) -> None:
        limited = scratch(end - start)
        torch.clamp(torch.from_numpy(block), -_LARGEST_HALF, _LARGEST_HALF, out=torch.from_numpy(limited))
        _convert(limited, self.values[start:end])

    def unpack(self, start: int, end: int, out: Floats) -> None:
        block = self.values[start:end]
        if not block.flags.writeable:
            block = block.copy()  # torch takes no array that may not be written to
        _convert(block, out)


class ScaledVector(PackedVector):
    """Integers from −levels to levels, times the scale of their chunk."""

    chunk: int
    levels: int
    largest_scale: np.float32
    """Largest scale whose product with `levels` is a finite float32."""

    def __init__(self, scales: Floats, values: NDArray[Any]) -> None:
        super().__init__(values)
        self.scales = scales

    @classmethod
    def empty(cls, size: int) -> Self:
        return cls(np.empty(chunks(size, cls.chunk), np.float32), np.empty(cls.length(size), cls.dtype))

    @classmethod
    def read(cls, size: int, frames: Sequence[Frame]) -> Self:
        expect_frames(len(frames), 2)
        scales: Floats = values_of(frames[0], "<f4", chunks(size, cls.chunk), "scales")
        if not ((scales >= 0) & (scales <= cls.largest_scale)).all():
            raise UpdateError("scales: a number that is no scale")
        return cls(scales, values_of(frames[1], cls.dtype, cls.length(size), cls.noun))

    def in_units(self, block: Floats, start: int, end: int) -> Floats:
        """A block in units of its scales, not rounded yet, in this thread's scratch buffer; stores the scales."""
        units = scratch(end - start)
        parts = zip(rows_of(block, self.chunk), rows_of(units, self.chunk), self.scales_of(start, end), strict=True)
        for rows, scaled, scales in parts:
            _scale(rows, scaled, scales, self.levels, self.largest_scale)
        return units

    def scale_up(self, out: Floats, start: int, end: int) -> None:
        for rows, scales in zip(rows_of(out, self.chunk), self.scales_of(start, end), strict=True):
            _multiply_rows(rows, scales, rows)

    def frames(self) -> Frames:
        return frame_of(self.scales), frame_of(self.values)

    def scales_of(self, start: int, end: int) -> list[Floats]:
        """The scales of the whole chunks, and that of a last one that is shorter."""
        first, whole, last = start // self.chunk, end // self.chunk, chunks(end, self.chunk)
        return [part for part in (self.scales[first:whole], self.scales[whole:last]) if len(part)]


class Int8Vector(ScaledVector):
    """8-bit integers from −127 to 127."""

    dtype, noun = "i1", "8-bit integers"
    chunk, levels, largest_scale = 1024, 127, np.float32(2.6e36)
    # scales are 0.4 % of the bytes

    def pack(self, block: Floats, start: int, end: int) -> None:
        with np.errstate(invalid="ignore"):
            units = self.in_units(block, start, end)
            units += _ROUNDING
        np.copyto(self.values[start:end], units.view(np.int32), casting="unsafe")  # of each, the lowest byte

    def unpack(self, start: int, end: int, out: Floats) -> None:
        out[:] = self.values[start:end]
        self.scale_up(out, start, end)


class Int4Vector(ScaledVector):
    """4-bit integers from −7 to 7, two in a byte, the first in its lower half; each is sent with 8 added."""

    dtype, noun = "u1", "4-bit integers"
    chunk, levels, largest_scale = 256, 7, np.float32(4.2e37)
    # small chunks, since the largest number of a chunk decides which numbers seven levels round to 0; scales are 3 % of the bytes

    @classmethod
    def length(cls, size: int) -> int:
        return -(-size // 2)

    def pack(self, block: Floats, start: int, end: int) -> None:
        with np.errstate(invalid="ignore"):
            whole = self.in_units(block, start, end)
            np.rint(whole, out=whole)
            whole += 8
            small = whole.astype(np.uint8)
        pairs = self.values[start // 2 : -(-end // 2)]
        pairs[:] = small[::2]
        pairs[: len(small) // 2] |= small[1::2] << 4

    def unpack(self, start: int, end: int, out: Floats) -> None:
        pairs = self.values[start // 2 : -(-end // 2)]
        out[::2] = pairs & 15
        out[1::2] = (pairs >> 4)[: len(out) // 2]
        out -= 8
        self.scale_up(out, start, end)


class TernaryVector(ScaledVector):
    """−1, 0 or 1, five in a byte. Each chunk begins at a whole byte.

    Numbers below half the scale become 0. The scale is 1.22 times the root mean square of the chunk, which minimises the error for normally
    distributed numbers, as in most updates. The error is large all the same, so this needs error feedback.
    """

    dtype, noun = "u1", "ternary numbers"
    chunk, levels, largest_scale = 1024, 1, np.float32(2.9e38)

    @classmethod
    def length(cls, size: int) -> int:
        whole, rest = divmod(size, cls.chunk)
        return whole * -(-cls.chunk // _PER_BYTE) + -(-rest // _PER_BYTE)

    def pack(self, block: Floats, start: int, end: int) -> None:
        for (rows, first), scales in zip(self._parts(block, start), self.scales_of(start, end), strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                peaks = np.maximum(np.abs(rows).max(1), np.float32(1e-38))
                spread = np.sqrt(np.square(rows / peaks[:, None]).mean(1)) * peaks * _STEP  # normalised: squares do not overflow
                scales[:] = np.minimum(spread, np.where(peaks < np.inf, self.largest_scale, np.inf))
                trits = 1 + np.sign(rows) * (np.abs(rows) > 0.5 * scales[:, None])
                padded = np.full((len(rows), -(-rows.shape[1] // _PER_BYTE) * _PER_BYTE), 1, np.uint8)
                np.copyto(padded[:, : rows.shape[1]], trits, casting="unsafe")
            packed = padded.reshape(-1, _PER_BYTE) @ _POWERS
            self.values[first : first + len(packed)] = packed

    def unpack(self, start: int, end: int, out: Floats) -> None:
        for (rows, first), scales in zip(self._parts(out, start), self.scales_of(start, end), strict=True):
            each = -(-rows.shape[1] // _PER_BYTE)
            found = _TABLE[self.values[first : first + len(rows) * each]].reshape(len(rows), -1)
            np.multiply(found[:, : rows.shape[1]], scales[:, None], out=rows)

    def _parts(self, block: Floats, start: int) -> list[tuple[Floats, int]]:
        """Whole chunks and a shorter last one, each with the index of its first byte."""
        parts, first = [], self.length(start)
        for rows in rows_of(block, self.chunk):
            parts.append((rows, first))
            first += len(rows) * -(-rows.shape[1] // _PER_BYTE)
        return parts


def _convert(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Convert between float16 and float32. NumPy uses vector instructions on ARM only, where it is ten times as fast as torch; elsewhere
    torch does. The bits are the same."""
    if _NUMPY_CONVERTS_FASTER:
        np.copyto(target, source, casting="same_kind")
    else:
        torch.from_numpy(target).copy_(torch.from_numpy(source))


def _scale(rows: Floats, scaled: Floats, scales: Floats, levels: int, largest: np.float32) -> None:
    """Scale each row to ±`levels` into `scaled`, and store its scale. A peak that is not finite becomes the scale, which the receiver
    refuses."""
    bits = np.abs(rows, out=scaled).view(np.int32)
    peaks: Floats = bits.max(1).view(np.float32)  # of floats without a sign the bits are in the same order, and integers compare faster
    scales[:] = np.where(peaks < _SMALLEST_PEAK, 0, np.where(peaks < np.inf, np.minimum(peaks / levels, largest), peaks))
    factors = np.divide(np.float32(levels), peaks, out=np.zeros_like(peaks), where=peaks >= _SMALLEST_PEAK)
    _multiply_rows(rows, factors, scaled)


def _multiply_rows(rows: Floats, factors: Floats, out: Floats) -> None:
    """Each row times its factor. With its usual buffer NumPy would expand the factors of short rows element by element, which takes longer
    than the product; with the smallest buffer it does not."""
    before = np.setbufsize(16)
    try:
        np.multiply(rows, factors[:, None], out=out)
    finally:
        np.setbufsize(before)


def chunks(size: int, chunk: int) -> int:
    return -(-size // chunk)


def rows_of(block: NDArray[Any], chunk: int) -> Iterator[Floats]:
    """Views of the block: the whole chunks as rows of one matrix, and a shorter last chunk as another."""
    whole = len(block) // chunk * chunk
    if whole:
        yield block[:whole].reshape(-1, chunk)
    if whole < len(block):
        yield block[whole:].reshape(1, -1)
