"""Memory for long frames is used again, and never while it is still read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shoal.protocol import buffer_pool
from shoal.protocol.checksums import crc32

SIZE = buffer_pool.SMALLEST_POOLED_BYTES


@pytest.fixture(autouse=True)
def nothing_is_free() -> Iterator[None]:
    buffer_pool._free.clear()
    yield
    buffer_pool._free.clear()


def address_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def test_an_unused_buffer_is_taken_again() -> None:
    first = buffer_pool.take_buffer(SIZE)
    where = address_of(first)
    del first
    assert address_of(buffer_pool.take_buffer(SIZE)) == where


def test_a_buffer_is_not_taken_while_a_view_of_it_is_used() -> None:
    first = buffer_pool.take_buffer(SIZE)
    part = torch.from_numpy(np.frombuffer(first, np.float32)[7:9])
    del first
    part.fill_(1.0)
    second = buffer_pool.take_buffer(SIZE)
    second[:] = bytes(SIZE)
    assert part.tolist() == [1.0, 1.0]


def test_free_buffers_are_bounded_and_of_the_length_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "MOST_FREE_BYTES", 3 * SIZE)
    held = [buffer_pool.take_buffer(SIZE) for _ in range(8)]
    del held
    other = buffer_pool.take_buffer(SIZE + 1)
    assert len(other) == SIZE + 1
    assert len(buffer_pool._free) == 3


def test_the_quick_checksum_is_the_one_that_every_zlib_computes() -> None:
    content = np.random.default_rng(1).bytes(100_003)
    assert crc32(memoryview(content)[5:], crc32(content[:5])) == zlib.crc32(content)
