"""Sparse vectors in chunks: the largest coordinates of every chunk, and their positions in Elias-Fano code.

A position within its chunk is split: the lower bits are sent as they are; the upper ones as the gaps between them, in unary. All chunks of
a length therefore take the same number of bytes: at 3 % of 4,096 values a position takes 7.1 bits, where the entropy bound is 6.5.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.frames import Frame, UpdateError, frame_of, values_of
from shoal.updates.codecs.sparse_packing import MAGNITUDE, Bits, Positions
from shoal.updates.parallel_blocks import BLOCK, Floats, in_blocks

Rows = NDArray[np.uint8]


class ChunkCode:
    """How `count` increasing positions below `length` are packed into bytes."""

    def __init__(self, length: int, count: int) -> None:
        self.length, self.count = length, count
        self.low = max(0, (length // count).bit_length() - 1) if count else 0
        """Number of lower bits; this choice takes the fewest bits in all."""
        self.unary = count + -(-length >> self.low) - 1 if count else 0
        """Number of bits in unary code: one for each position, and a zero for each step of the upper parts."""
        self.bits = self.unary + count * self.low
        self.bytes = -(-self.bits // 8)

    def pack(self, positions_RC: Positions) -> Rows:
        """One row of bytes for each chunk."""
        rows = len(positions_RC)
        bits = np.zeros((rows, self.bits), np.uint8)
        ones = (positions_RC >> self.low) + np.arange(self.count)
        bits.reshape(-1)[ones + np.arange(0, bits.size, self.bits)[:, None]] = 1
        small = positions_RC.astype(np.uint16)
        for bit in range(self.low):
            start = self.unary + bit * self.count
            np.bitwise_and(small >> bit, 1, out=bits[:, start : start + self.count], casting="unsafe")
        return np.packbits(bits, axis=1)

    def unpack(self, rows: Rows) -> Positions:
        """The positions of each chunk. Holds: increasing, below `length`."""
        bits = np.unpackbits(rows, axis=1)
        if bits[:, self.bits :].any() or (np.count_nonzero(bits[:, : self.unary], axis=1) != self.count).any():
            raise UpdateError(f"positions: a chunk has not {self.count} of them")
        ones = np.nonzero(bits[:, : self.unary])[1].reshape(-1, self.count)
        positions: Positions = ones - np.arange(self.count)
        for bit in range(self.low - 1, -1, -1):
            start = self.unary + bit * self.count
            positions <<= 1
            positions |= bits[:, start : start + self.count]
        if (positions[:, -1] >= self.length).any() or (positions[:, 1:] <= positions[:, :-1]).any():
            raise UpdateError("positions: they do not increase, or are outside their chunk")
        return positions


class ChunkedPositions:
    """Chooses as large a share of every chunk, and packs the positions. The last chunk of a vector may be shorter."""

    def __init__(self, chunk: int, ratio: float) -> None:
        self.chunk, self.ratio = chunk, ratio
        self.full = ChunkCode(chunk, self._share_of(chunk))
        self._width = max(1, BLOCK // chunk) * chunk
        """Numbers of a block: whole chunks."""

    def count(self, size: int) -> int:
        whole, rest = divmod(size, self.chunk)
        return whole * self.full.count + self._share_of(rest)

    def most_bytes(self, size: int) -> int:
        whole, rest = divmod(size, self.chunk)
        return whole * self.full.bytes + self._last(rest).bytes

    def largest(self, values: Floats, add: Floats | None, keep: float = 1.0) -> tuple[Positions, Floats]:
        """The largest of every chunk of `values` by magnitude, in the order of their positions; of equal ones the first. `values` are
        multiplied by `keep`, and `add` is added to them, in place."""
        positions = np.empty(self.count(len(values)), np.int64)
        found = np.empty(len(positions), np.float32)

        def search(start: int, end: int) -> None:
            block, first = values[start:end], self.count(start)
            if keep != 1:
                block *= np.float32(keep)
            if add is not None:
                block += add[start:end]
            for rows, code, at in self._parts(block):
                chosen = _largest_of_rows(rows, code.count)
                here = slice(first, first + len(chosen))
                positions[here], found[here], first = chosen + (start + at), rows.reshape(-1)[chosen], first + len(chosen)

        in_blocks(len(values), search, self._width)
        return positions, found

    def pack(self, positions: Positions, size: int) -> memoryview:
        packed = np.empty(self.most_bytes(size), np.uint8)

        def write(start: int, end: int) -> None:
            at = self.most_bytes(start)
            for first, rows, code in self._coded(start, end):
                inside = positions[first : first + rows * code.count].reshape(rows, code.count) % self.chunk
                packed[at : at + rows * code.bytes].reshape(rows, -1)[:] = code.pack(inside)
                at += rows * code.bytes

        in_blocks(size, write, self._width)
        return frame_of(packed)

    def unpack(self, frame: Frame, size: int) -> Positions:
        """The positions in a frame. Holds: as many in every chunk as `largest` finds, increasing, within the vector."""
        packed = values_of(frame, "u1", self.most_bytes(size), "positions")
        positions = np.empty(self.count(size), np.int64)

        def read(start: int, end: int) -> None:
            at, chunk = self.most_bytes(start), start
            for first, rows, code in self._coded(start, end):
                inside = code.unpack(packed[at : at + rows * code.bytes].reshape(rows, -1))
                inside += np.arange(chunk, chunk + rows * self.chunk, self.chunk)[:, None]
                positions[first : first + inside.size] = inside.reshape(-1)
                at, chunk = at + rows * code.bytes, chunk + rows * self.chunk

        in_blocks(size, read, self._width)
        return positions

    def _share_of(self, length: int) -> int:
        return min(length, max(1, round(self.ratio * length)))

    def _last(self, rest: int) -> ChunkCode:
        return ChunkCode(rest, self._share_of(rest))

    def _parts(self, block: Floats) -> list[tuple[Floats, ChunkCode, int]]:
        """The whole chunks of a block as rows, and a shorter last one, each with its start."""
        whole = len(block) // self.chunk * self.chunk
        parts = [(block[:whole].reshape(-1, self.chunk), self.full, 0)] if whole else []
        if whole < len(block):
            parts.append((block[whole:].reshape(1, -1), self._last(len(block) - whole), whole))
        return parts

    def _coded(self, start: int, end: int) -> list[tuple[int, int, ChunkCode]]:
        """Of a block: the index of its first position, the number of chunks and their code; then the same of a shorter last chunk."""
        first, (whole, rest) = self.count(start), divmod(end - start, self.chunk)
        parts = [(first, whole, self.full)] if whole else []
        if rest:
            parts.append((first + whole * self.full.count, 1, self._last(rest)))
        return parts


def _largest_of_rows(rows: Floats, count: int) -> Positions:
    """Flat indices of the `count` largest of every row by magnitude; of equal ones the first."""
    magnitudes: Bits = rows.view(np.int32) & MAGNITUDE
    length = magnitudes.shape[1]
    least = np.partition(magnitudes, length - count, axis=1)[:, length - count, None]
    chosen = magnitudes >= least
    surplus = np.flatnonzero(np.count_nonzero(chosen, axis=1) > count)
    if len(surplus):
        above, equal = magnitudes[surplus] > least[surplus], magnitudes[surplus] == least[surplus]
        missing = count - np.count_nonzero(above, axis=1)[:, None]
        chosen[surplus] = above | (equal & (np.cumsum(equal, axis=1) <= missing))
    return np.flatnonzero(chosen)
