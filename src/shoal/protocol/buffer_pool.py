"""Memory for long frames that is used again and again.

The system clears each page that it hands out, and to have it do so for 25 MB takes longer than to fill them. A frame lives for a moment and
the next one has the same length, so a few rooms serve all of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

WORTH_BYTES = 1 << 20
"""Shorter frames get fresh memory: the system hands that out at once."""
MOST_FREE_BYTES = 256 << 20
"""Rooms that nobody uses are kept up to this much."""

Room = NDArray[np.uint8]

_back: deque[Room] = deque()
"""Rooms that came back, the last one last. Python collects whenever it likes, so whoever brings one back takes no lock."""
_lock = threading.Lock()


def room(size: int) -> memoryview:
    """Room for so many bytes, which hold anything. It is free again when nothing refers to it or to a part of it any more."""
    if size < WORTH_BYTES:
        return np.empty(size, np.uint8).data
    memory = _kept(size)
    if memory is None:
        memory = np.empty(size, np.uint8)
    lent = memory.view(_Lent)
    weakref.finalize(lent, _back.append, memory).atexit = False
    return lent.data


class _Lent(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A room while it is used. Being a class of its own, it stays referred to by whatever is made of it."""


def _kept(size: int) -> Room | None:
    """The room of this size that came back last, if there is one; the oldest rooms beyond what may be free are let go."""
    with _lock:
        rooms = [_back.popleft() for _ in range(len(_back))]
        found = next((at for at in reversed(range(len(rooms))) if len(rooms[at]) == size), None)
        memory = None if found is None else rooms.pop(found)
        free = 0
        for kept in reversed(rooms):
            free += len(kept)
            if free <= MOST_FREE_BYTES:
                _back.appendleft(kept)
        return memory
