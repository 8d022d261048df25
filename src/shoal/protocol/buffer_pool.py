"""A pool of buffers for long frames.

The operating system zeroes each new page, which for 25 MB takes longer than to fill them. Frames are short-lived and mostly of one length,
so a few buffers are enough.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

SMALLEST_POOLED_BYTES = 1 << 20
"""Shorter buffers are allocated anew, which costs little."""
MOST_FREE_BYTES = 256 << 20
"""The most bytes that unused buffers may take."""

Buffer = NDArray[np.uint8]

_free: deque[Buffer] = deque()
"""Free buffers, the last returned one last. Finalizers append to it at any moment, so they take no lock."""
_lock = threading.Lock()


def take_buffer(size: int) -> memoryview:
    """An uninitialised buffer of `size` bytes. It returns to the pool when neither it nor a view of it is referenced any more."""
    if size < SMALLEST_POOLED_BYTES:
        return np.empty(size, np.uint8).data
    memory = _pop_free(size)
    if memory is None:
        memory = np.empty(size, np.uint8)
    lent = memory.view(_LentBuffer)
    weakref.finalize(lent, _free.append, memory).atexit = False
    return lent.data


class _LentBuffer(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A subclass, so that NumPy views keep the buffer alive; it returns to the pool when the last view dies."""


def _pop_free(size: int) -> Buffer | None:
    """The last returned buffer of this size, or None. The oldest buffers beyond `MOST_FREE_BYTES` are dropped."""
    with _lock:
        buffers = [_free.popleft() for _ in range(len(_free))]
        found = next((at for at in reversed(range(len(buffers))) if len(buffers[at]) == size), None)
        memory = None if found is None else buffers.pop(found)
        free_bytes = 0
        for kept in reversed(buffers):
            free_bytes += len(kept)
            if free_bytes <= MOST_FREE_BYTES:
                _free.appendleft(kept)
        return memory
