"""Sparse vectors: selecting the largest coordinates, and packing positions.

A position is sent as its distance from the previous one, minus one: in one byte where positions are dense, else in two; the largest value
is an escape that adds itself and continues. Any bytes therefore decode to increasing positions, and only the last one needs a check. At a
density of 1 % a position takes 8.6 bits; the entropy bound is 8.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.frames import Frame, UpdateError, expect_frames, frame_of, values_of
from shoal.updates.codecs.base import expect_finite
from shoal.updates.parallel_blocks import Floats, in_blocks

Positions = NDArray[np.int64]
Bits = NDArray[np.int32]

MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits but the sign: as integers they are ordered like the absolute values, with infinities and NaN last."""
_SAMPLE = 1 << 16
_WIDE_ABOVE = 368
"""Mean distance from which two bytes per position are fewer than one byte with escapes."""


def largest(values: Floats, count: int, add: Floats | None = None) -> tuple[Positions, Floats]:
    """The `count` largest of `values` by magnitude, in the order of their positions; of equal ones the first.

    `add` is added to `values` in place. A random sample gives a threshold that slightly too many values pass; the surplus is then removed.
    """
    threshold = _estimate(values, count, add)
    positions, found = _at_least(values, threshold, add)
    if len(positions) < count and threshold > 1:
        positions, found = _at_least(values, np.int32(1), None)
    if len(positions) < count:
        return _filled_up(values, positions, count)
    chosen = _select(found.view(np.int32) & MAGNITUDE, count)
    return positions[chosen], found[chosen]


def _estimate(values: Floats, count: int, add: Floats | None) -> np.int32:
    """A magnitude that very probably at least `count` values reach; at least that of the smallest positive number."""
    size = len(values)
    indices: Any = slice(None) if size <= 2 * _SAMPLE else np.random.default_rng(size).integers(0, size, _SAMPLE)
    sample = values[indices] if add is None else values[indices] + add[indices]
    share = count / size * len(sample)
    rank = count if size == len(sample) else min(len(sample), int(share + 4 * share**0.5 + 2))
    bits = sample.view(np.int32) & MAGNITUDE
    return max(np.int32(1), np.partition(bits, len(bits) - rank)[len(bits) - rank])


def _at_least(values: Floats, threshold: np.int32, add: Floats | None) -> tuple[Positions, Floats]:
    found: dict[int, tuple[Positions, Floats]] = {}

    def search(start: int, end: int) -> None:
        block = values[start:end]
        if add is not None:
            block += add[start:end]
        indices = np.flatnonzero((block.view(np.int32) & MAGNITUDE) >= threshold)
        found[start] = indices + start, block[indices]

    in_blocks(len(values), search)
    return _joined(found)


def _joined(found: dict[int, tuple[Positions, Floats]]) -> tuple[Positions, Floats]:
    parts = [found[start] for start in sorted(found)]
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _select(magnitudes: Bits, count: int) -> NDArray[np.bool_]:
    """Which are the `count` largest."""
    least = np.partition(magnitudes, len(magnitudes) - count)[len(magnitudes) - count]
    chosen: NDArray[np.bool_] = magnitudes > least
    equal = np.flatnonzero(magnitudes == least)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return chosen


def _filled_up(values: Floats, positions: Positions, count: int) -> tuple[Positions, Floats]:
    """All non-zero values, and as many zeros as are missing."""
    zeros = np.flatnonzero(values[: 2 * count] == 0)[: count - len(positions)]
    if len(zeros) < count - len(positions):
        zeros = np.flatnonzero(values == 0)[: count - len(positions)]
    everything = np.sort(np.concatenate([positions, zeros]))
    return everything, values[everything]


def _symbols(count: int, size: int) -> tuple[str, int]:
    """The integer type of packed positions, and its largest value, the escape."""
    return ("<u2", 0xFFFF) if count * _WIDE_ABOVE < size else ("u1", 0xFF)


def index_bytes(count: int, size: int) -> int:
    """The most bytes that `count` positions take in a vector of `size`."""
    kind, escape = _symbols(count, size)
    return (count + size // escape) * np.dtype(kind).itemsize if count else 0


def pack(positions: Positions, size: int) -> memoryview:
    """Increasing positions as bytes."""
    kind, escape = _symbols(len(positions), size)
    gaps = np.diff(positions, prepend=-1) - 1
    repeats = gaps // escape
    if not repeats.any():
        return frame_of(gaps.astype(kind))
    ends = np.cumsum(repeats + 1) - 1
    packed = np.full(int(ends[-1]) + 1, escape, kind)
    packed[ends] = gaps - repeats * escape
    return frame_of(packed)


def unpack(frame: Frame, count: int, size: int) -> Positions:
    """The positions in a frame. Holds: exactly `count`, increasing, within the vector."""
    kind, escape = _symbols(count, size)
    present, itemsize = memoryview(frame).nbytes, np.dtype(kind).itemsize
    if present % itemsize or not count * itemsize <= present <= index_bytes(count, size):
        raise UpdateError(f"positions: {present} bytes cannot hold {count} positions in a vector of {size}")
    packed = values_of(frame, kind, present // itemsize, "positions")
    ends = np.flatnonzero(packed != escape)
    if len(ends) != count or (count and ends[-1] != len(packed) - 1):
        raise UpdateError(f"positions: {len(ends)} where {count} are needed")
    positions: Positions = np.cumsum(packed, dtype=np.int64)[ends] + np.arange(count)
    if count and positions[-1] >= size:
        raise UpdateError(f"positions: {positions[-1]} is outside a vector of {size}")
    return positions


def read(frames: Sequence[Frame], size: int) -> tuple[Positions, Floats]:
    """Any number of positions with their values, all of them checked."""
    expect_frames(len(frames), 2)
    present = memoryview(frames[1]).nbytes // 4
    if present > size:
        raise UpdateError(f"values: {present} for a vector of {size}")
    values: Floats = values_of(frames[1], "<f4", present, "values")
    expect_finite(values)
    return unpack(frames[0], present, size), values


def differences(old: Floats, new: Floats) -> tuple[Positions, Floats] | None:
    """Positions where two vectors differ in any bit, and the new values; None if that is larger than the whole new vector."""
    found: dict[int, tuple[Positions, Floats]] = {}
    most = len(new) * 4 // 5
    counts: list[int] = []

    def compare(start: int, end: int) -> None:
        if sum(counts) > most:
            return
        differs = old[start:end].view(np.int32) != new[start:end].view(np.int32)
        indices = np.flatnonzero(differs)
        counts.append(len(indices))
        found[start] = indices + start, new[start:end][indices]

    in_blocks(len(new), compare)
    return None if sum(counts) > most else _joined(found)
