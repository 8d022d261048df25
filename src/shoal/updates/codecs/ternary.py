"""Ternary codec: each number as −1, 0 or 1 times the scale of its chunk; five of them in a byte, since 3⁵ < 256.

Numbers below half the scale become 0. The scale is 1.22 times the root mean square of the chunk, which minimises the error for normally
distributed numbers, as in most updates. The error is large all the same, so this needs error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shoal.config.schema.updates import Codec
from shoal.protocol.frames import Frame, Frames, UpdateError, expect_frames, frame_of, values_of
from shoal.updates.codecs.base import BlockwiseCoder, Coder, PackedVector
from shoal.updates.codecs.dense import chunks, rows_of
from shoal.updates.parallel_blocks import Floats

CHUNK = 1024
PER_BYTE = 5
_STEP = np.float32(1.22)
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)
_LARGEST_SCALE = np.float32(2.9e38)
_TABLE: Floats = (np.arange(256)[:, None] // _POWERS % 3 - 1).astype(np.float32)
"""The five numbers of every byte."""


def ternary(codec: Codec) -> Coder:
    return BlockwiseCoder(TernaryVector)


class TernaryVector(PackedVector):
    """Ternary numbers, five in a byte. Each chunk begins at a whole byte."""

    def __init__(self, scales: Floats, values: NDArray[np.uint8]) -> None:
        self.scales, self.values = scales, values

    @classmethod
    def empty(cls, size: int) -> Self:
        return cls(np.empty(chunks(size, CHUNK), np.float32), np.empty(packed_bytes(size), np.uint8))

    @classmethod
    def read(cls, size: int, frames: Sequence[Frame]) -> Self:
        expect_frames(len(frames), 2)
        scales: Floats = values_of(frames[0], "<f4", chunks(size, CHUNK), "scales")
        if not ((scales >= 0) & (scales <= _LARGEST_SCALE)).all():
            raise UpdateError("scales: a number that is no scale")
        return cls(scales, values_of(frames[1], "u1", packed_bytes(size), "ternary numbers"))

    def pack(self, block: Floats, start: int, end: int) -> None:
        for (rows, first), scales in zip(self._parts(block, start), self._scales(start, end), strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                peaks = np.maximum(np.abs(rows).max(1), np.float32(1e-38))
                spread = np.sqrt(np.square(rows / peaks[:, None]).mean(1)) * peaks * _STEP  # normalised: squares do not overflow
                scales[:] = np.minimum(spread, np.where(peaks < np.inf, _LARGEST_SCALE, np.inf))
                trits = 1 + np.sign(rows) * (np.abs(rows) > 0.5 * scales[:, None])
                padded = np.full((len(rows), -(-rows.shape[1] // PER_BYTE) * PER_BYTE), 1, np.uint8)
                np.copyto(padded[:, : rows.shape[1]], trits, casting="unsafe")
            packed = padded.reshape(-1, PER_BYTE) @ _POWERS
            self.values[first : first + len(packed)] = packed

    def unpack(self, start: int, end: int, out: Floats) -> None:
        for (rows, first), scales in zip(self._parts(out, start), self._scales(start, end), strict=True):
            each = -(-rows.shape[1] // PER_BYTE)
            found = _TABLE[self.values[first : first + len(rows) * each]].reshape(len(rows), -1)
            np.multiply(found[:, : rows.shape[1]], scales[:, None], out=rows)

    def frames(self) -> Frames:
        return frame_of(self.scales), frame_of(self.values)

    def _parts(self, block: Floats, start: int) -> list[tuple[Floats, int]]:
        """Whole chunks and a shorter last one, each with the index of its first byte."""
        parts, first = [], packed_bytes(start)
        for rows in rows_of(block, CHUNK):
            parts.append((rows, first))
            first += len(rows) * -(-rows.shape[1] // PER_BYTE)
        return parts

    def _scales(self, start: int, end: int) -> list[Floats]:
        first, whole, last = start // CHUNK, end // CHUNK, chunks(end, CHUNK)
        return [part for part in (self.scales[first:whole], self.scales[whole:last]) if len(part)]


def packed_bytes(size: int) -> int:
    """Bytes of `size` packed numbers; each chunk begins at a whole byte."""
    whole, rest = divmod(size, CHUNK)
    return whole * -(-CHUNK // PER_BYTE) + -(-rest // PER_BYTE)
