"""Top-k codec: only the largest numbers are sent, with their positions. The others stay in the residual (error feedback)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.config.schema.updates import NoCodec, TopKCodec
from shoal.protocol.frames import Frame, Frames, expect_frames
from shoal.updates.codecs import sparse_packing
from shoal.updates.codecs.base import Coder
from shoal.updates.parallel_blocks import Floats


class TopKCoder(Coder):
    """Packed positions, and the values encoded by another codec."""

    def __init__(self, codec: TopKCodec) -> None:
        self.codec, kept = codec, codec.for_weights()
        self.kept: Coder = kept.coder
        self.frames = 2 if isinstance(kept, NoCodec) else 3

    def encode(self, values: Floats, lost: Floats | None) -> Frames:
        count = self._count(len(values))
        if not len(values):
            return memoryview(b""), *self.kept.encode(np.empty(0, np.float32), None)
        if lost is None:
            positions, found = sparse_packing.largest(values, count)
            return sparse_packing.pack(positions, len(values)), *self.kept.encode(found, None)
        if self.codec.error_decay < 1:
            lost *= np.float32(self.codec.error_decay)
        positions, found = sparse_packing.largest(lost, count, values)
        rest = np.zeros(count, np.float32)
        frames = self.kept.encode(found, rest)
        lost[positions] = rest
        return sparse_packing.pack(positions, len(values)), *frames

    def decode(self, size: int, frames: Sequence[Frame], out: Floats) -> None:
        positions, found = self._read(size, frames)
        out[:] = 0
        out[positions] = found

    def add(self, size: int, frames: Sequence[Frame], target: Floats, scale: float, own: bool) -> None:
        positions, found = self._read(size, frames)
        target[positions] += found * scale

    def most_bytes(self, size: int) -> int:
        count = self._count(size)
        return sparse_packing.index_bytes(count, size) + self.kept.most_bytes(count)

    def _count(self, size: int) -> int:
        return min(size, max(1, round(self.codec.ratio * size)))

    def _read(self, size: int, frames: Sequence[Frame]) -> tuple[sparse_packing.Positions, Floats]:
        count = self._count(size)
        expect_frames(len(frames), self.frames)
        values = np.empty(count, np.float32)
        self.kept.decode(count, frames[1:], values)
        return sparse_packing.unpack(frames[0], count, size), values
