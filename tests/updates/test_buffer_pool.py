"""Memory for long frames is used again, and never while somebody still reads it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shoal.protocol import buffer_pool as rooms
from shoal.protocol.checksums import crc32

SIZE = rooms.WORTH_BYTES


@pytest.fixture(autouse=True)
def nothing_is_free() -> Iterator[None]:
    rooms._back.clear()
    yield
    rooms._back.clear()


def place(room: memoryview) -> int:
    return int(np.frombuffer(room, np.uint8).ctypes.data)


def test_a_room_that_nobody_uses_any_more_is_lent_again() -> None:
    first = rooms.room(SIZE)
    where = place(first)
    del first
    assert place(rooms.room(SIZE)) == where


def test_a_room_is_not_lent_while_a_part_of_it_is_used() -> None:
    first = rooms.room(SIZE)
    part = torch.from_numpy(np.frombuffer(first, np.float32)[7:9])
    del first
    part.fill_(1.0)
    second = rooms.room(SIZE)
    second[:] = bytes(SIZE)
    assert part.tolist() == [1.0, 1.0]


def test_free_rooms_are_bounded_and_of_the_length_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MOST_FREE_BYTES", 3 * SIZE)
    held = [rooms.room(SIZE) for _ in range(8)]
    del held
    other = rooms.room(SIZE + 1)
    assert len(other) == SIZE + 1
    assert len(rooms._back) == 3


def test_the_quick_checksum_is_the_one_that_every_zlib_computes() -> None:
    content = np.random.default_rng(1).bytes(100_003)
    assert crc32(memoryview(content)[5:], crc32(content[:5])) == zlib.crc32(content)
