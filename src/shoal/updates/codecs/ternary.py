"""Ternary codec: each number as −1, 0 or 1 times the scale of its chunk; five of them in a byte, since 3⁵ < 256.

Numbers below half the scale become 0. The scale is 1.22 times the root mean square of the chunk, which minimises the error for normally
distributed numbers, as in most updates. The error is large all the same, so this needs error feedback.
"""

from __future__ import annotations

import numpy as np

from shoal.config.schema.updates import Codec
from shoal.updates.codecs.base import BlockwiseCoder, Coder
from shoal.updates.codecs.dense import ScaledVector, rows_of
from shoal.updates.parallel_blocks import Floats

PER_BYTE = 5
_STEP = np.float32(1.22)
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)
_TABLE: Floats = (np.arange(256)[:, None] // _POWERS % 3 - 1).astype(np.float32)
"""The five numbers of every byte."""


def ternary(codec: Codec) -> Coder:
    return BlockwiseCoder(TernaryVector)


class TernaryVector(ScaledVector):
    """Ternary numbers, five in a byte. Each chunk begins at a whole byte."""

    dtype, noun = "u1", "ternary numbers"
    chunk, levels, largest_scale = 1024, 1, np.float32(2.9e38)

    @classmethod
    def length(cls, size: int) -> int:
        whole, rest = divmod(size, cls.chunk)
        return whole * -(-cls.chunk // PER_BYTE) + -(-rest // PER_BYTE)

    def pack(self, block: Floats, start: int, end: int) -> None:
        for (rows, first), scales in zip(self._parts(block, start), self.scales_of(start, end), strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                peaks = np.maximum(np.abs(rows).max(1), np.float32(1e-38))
                spread = np.sqrt(np.square(rows / peaks[:, None]).mean(1)) * peaks * _STEP  # normalised: squares do not overflow
                scales[:] = np.minimum(spread, np.where(peaks < np.inf, self.largest_scale, np.inf))
                trits = 1 + np.sign(rows) * (np.abs(rows) > 0.5 * scales[:, None])
                padded = np.full((len(rows), -(-rows.shape[1] // PER_BYTE) * PER_BYTE), 1, np.uint8)
                np.copyto(padded[:, : rows.shape[1]], trits, casting="unsafe")
            packed = padded.reshape(-1, PER_BYTE) @ _POWERS
            self.values[first : first + len(packed)] = packed

    def unpack(self, start: int, end: int, out: Floats) -> None:
        for (rows, first), scales in zip(self._parts(out, start), self.scales_of(start, end), strict=True):
            each = -(-rows.shape[1] // PER_BYTE)
            found = _TABLE[self.values[first : first + len(rows) * each]].reshape(len(rows), -1)
            np.multiply(found[:, : rows.shape[1]], scales[:, None], out=rows)

    def _parts(self, block: Floats, start: int) -> list[tuple[Floats, int]]:
        """Whole chunks and a shorter last one, each with the index of its first byte."""
        parts, first = [], self.length(start)
        for rows in rows_of(block, self.chunk):
            parts.append((rows, first))
            first += len(rows) * -(-rows.shape[1] // PER_BYTE)
        return parts
