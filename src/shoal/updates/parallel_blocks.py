"""Work on long vectors in blocks that fit a core's cache, on all cores.

NumPy and torch let go of the interpreter inside their loops, so plain threads share the work. Each thread takes the next block when it is
done with one: handing every block to the pool as a task of its own would cost as much as the work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
BLOCK = 1 << 17
"""Numbers in a block: half a megabyte of floats, so that a block, what it becomes and a scratch copy stay in the cache."""

_MOST_THREADS = 4

_own = threading.local()


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="blocks")


def usable_cores() -> int:
    """Cores that this process may use: of those the machine has, it may be kept to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores() -> int:
    """Cores this process may use, as many as are of use: of more threads too many wait for their turn to begin an operation."""
    return min(usable_cores(), _MOST_THREADS)


def in_blocks(size: int, work: Callable[[int, int], None], width: int = BLOCK) -> None:
    """`work(start, end)` for every block of `size` numbers. The first error is raised, after all threads have stopped."""
    if size <= width:
        if size:
            work(0, size)
        return
    starts = count(0, width)

    def take_blocks(_: int) -> None:
        for start in starts:
            if start >= size:
                return
            work(start, min(start + width, size))

    threads = min(cores(), -(-size // width))
    for done in list(_pool(os.getpid()).map(_without_raising(take_blocks), range(threads))):
        if done is not None:
            raise done


def _without_raising(work: Callable[[int], None]) -> Callable[[int], Exception | None]:
    def guarded(number: int) -> Exception | None:
        try:
            work(number)
        except Exception as error:
            return error
        return None

    return guarded


def scratch(size: int) -> Floats:
    """Room for a block, the thread's own; the next call in this thread hands out the same. Fresh pages cost more than the arithmetic."""
    if size > BLOCK:
        return np.empty(size, np.float32)
    if not hasattr(_own, "floats"):
        _own.floats = np.empty(BLOCK, np.float32)
    room: Floats = _own.floats[:size]
    return room


def all_finite(block: Floats) -> bool:
    """Whether no number is infinite or not a number. A dot product with zeros takes two thirds of the time on a quiet machine, but BLAS
    starts threads for it, which wait for cores that other processes use: beside another job it took ten times as long."""
    return bool(np.isfinite(block).all())
