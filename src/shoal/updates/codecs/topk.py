"""Top-k codec: only the largest numbers are sent, with their positions. The others stay in the residual (error feedback)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.config.schema.updates import Codec, TopKCodec
from shoal.protocol.frames import Frame, Frames, expect_frames
from shoal.updates.codecs import sparse_packing
from shoal.updates.codecs.base import Coder
from shoal.updates.codecs.chunked_positions import ChunkedPositions
from shoal.updates.codecs.sparse_packing import Positions
from shoal.updates.codecs.two_bit import TwoBitCoder
from shoal.updates.parallel_blocks import Floats


class WholePositions:
    """The largest numbers of the whole vector, as `ChunkedPositions` are those of every chunk."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def count(self, size: int) -> int:
        return min(size, max(1, round(self.ratio * size)))

    def most_bytes(self, size: int) -> int:
        return sparse_packing.index_bytes(self.count(size), size)

    def largest(self, values: Floats, add: Floats | None, keep: float = 1.0) -> tuple[Positions, Floats]:
        if keep != 1:
            values *= np.float32(keep)
        return sparse_packing.largest(values, self.count(len(values)), add)

    def pack(self, positions: Positions, size: int) -> memoryview:
        return sparse_packing.pack(positions, size)

    def unpack(self, frame: Frame, size: int) -> Positions:
        return sparse_packing.unpack(frame, self.count(size), size)


class TopKCoder(Coder):
    """Packed positions, and the values encoded by another codec."""

    def __init__(self, codec: TopKCodec) -> None:
        self.codec = codec
        self.positions = ChunkedPositions(codec.chunk, codec.ratio) if codec.chunk else WholePositions(codec.ratio)
        if codec.chunk and codec.values == "2-bit":
            self.kept: Coder = TwoBitCoder(self.positions.count(codec.chunk))
        else:
            self.kept = Codec.kinds["none" if codec.values == "float32" else codec.values]().coder
        self.frames = 2 if codec.values == "float32" else 3

    def encode(self, values: Floats, lost: Floats | None) -> Frames:
        size = len(values)
        if not size:
            return memoryview(b""), *self.kept.encode(np.empty(0, np.float32), None)
        if lost is None:
            positions, found = self.positions.largest(values, None)
            return self.positions.pack(positions, size), *self.kept.encode(found, None)
        positions, found = self.positions.largest(lost, values, self.codec.error_decay)
        rest = np.zeros(len(found), np.float32)
        frames = self.kept.encode(found, rest)
        lost[positions] = rest
        return self.positions.pack(positions, size), *frames

    def decode(self, size: int, frames: Sequence[Frame], out: Floats) -> None:
        positions, found = self._read(size, frames)
        out[:] = 0
        out[positions] = found

    def add(self, size: int, frames: Sequence[Frame], target: Floats, scale: float, own: bool) -> None:
        positions, found = self._read(size, frames)
        target[positions] += found * scale

    def most_bytes(self, size: int) -> int:
        return self.positions.most_bytes(size) + self.kept.most_bytes(self.positions.count(size))

    def _read(self, size: int, frames: Sequence[Frame]) -> tuple[Positions, Floats]:
        expect_frames(len(frames), self.frames)
        count = self.positions.count(size) if size else 0
        values = np.empty(count, np.float32)
        self.kept.decode(count, frames[1:], values)
        return self.positions.unpack(frames[0], size), values
