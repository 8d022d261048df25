"""2-bit values: a sign, and which of two magnitudes of the chunk. For the values that top-k keeps, none of which is near zero.

Magnitudes up to their mean become the mean of those, the larger ones the mean of the larger ones. The two means are bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.frames import Frame, Frames, UpdateError, expect_frames, frame_of, values_of
from shoal.updates.codecs.base import Coder
from shoal.updates.codecs.dense import chunks, rows_of
from shoal.updates.parallel_blocks import Floats

_LARGEST = np.uint16(0x7F7F)
"""The bits of the largest finite bfloat16 number."""


class TwoBitCoder(Coder):
    """Frames: two magnitudes for each chunk; the signs and choices as bits, each chunk from a whole byte on."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def pack(self, values: Floats) -> Frames:
        size = len(values)
        scales = np.empty((chunks(size, self.chunk), 2), "<u2")
        packed = np.empty(self._bytes(size), np.uint8)
        row = at = 0
        for rows in rows_of(values, self.chunk):
            magnitudes = np.abs(rows)
            larger = magnitudes > magnitudes.mean(1, dtype=np.float64)[:, None]
            scales[row : row + len(rows)] = _means(magnitudes, larger)
            bits = np.packbits(np.concatenate([np.signbit(rows), larger], axis=1), axis=1)
            packed[at : at + bits.size] = bits.reshape(-1)
            row, at = row + len(rows), at + bits.size
        return frame_of(scales.reshape(-1)), frame_of(packed)

    def unpack(self, size: int, frames: Sequence[Frame]) -> Floats:
        expect_frames(len(frames), 2)
        scales = values_of(frames[0], "<u2", 2 * chunks(size, self.chunk), "scales")
        if (scales > _LARGEST).any():
            raise UpdateError("scales: a number that is no scale")
        magnitudes = (scales.astype(np.uint32) << 16).view(np.float32).reshape(-1, 2)
        levels = np.concatenate([magnitudes, -magnitudes], axis=1)
        packed = values_of(frames[1], "u1", self._bytes(size), "2-bit values")
        out = np.empty(size, np.float32)
        row = at = 0
        for rows in rows_of(out, self.chunk):
            length = rows.shape[1]
            each = -(-2 * length // 8)
            bits = np.unpackbits(packed[at : at + len(rows) * each].reshape(len(rows), each), axis=1)
            level = (bits[:, :length] << 1) | bits[:, length : 2 * length]
            indices = level + (4 * np.arange(row, row + len(rows)))[:, None]
            np.take(levels.reshape(-1), indices, out=rows, mode="clip")
            row, at = row + len(rows), at + len(rows) * each
        return out

    def most_bytes(self, size: int) -> int:
        return 4 * chunks(size, self.chunk) + self._bytes(size)

    def _bytes(self, size: int) -> int:
        whole, rest = divmod(size, self.chunk)
        return whole * -(-2 * self.chunk // 8) + -(-2 * rest // 8)


def _means(magnitudes: Floats, larger: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """For each row the bits of the mean of the smaller magnitudes and of the larger ones, as bfloat16."""
    count = np.count_nonzero(larger, axis=1)
    total = magnitudes.sum(1, dtype=np.float64)
    above = np.where(larger, magnitudes, 0).sum(1, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        low = (total - above) / (magnitudes.shape[1] - count)
        high = np.where(count > 0, above / np.maximum(count, 1), low)
        bits = np.stack([low, high], axis=1).astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, of two equally near ones to the even one
    finite = bits < 0x7F800000
    return np.where(finite, np.minimum(rounded, _LARGEST), 0x7FC0).astype(np.uint16)
