"""Work on long vectors in blocks that fit a core's cache, on several cores.

NumPy and torch release the GIL inside their loops, so threads share the work. Each thread takes the next block when it has finished one:
submitting every block to the pool as a task would cost as much as the work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from shoal.config.environment import usable_cores

Floats = NDArray[np.float32]
BLOCK = 1 << 17
"""Numbers in a block: half a megabyte of floats, so that a block, its result and a scratch copy fit the cache."""

_MOST_THREADS = 4

_own = threading.local()


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="blocks")


def cores() -> int:
    """Number of threads: usable cores up to a limit, beyond which threads mostly wait for the GIL."""
    return min(usable_cores(), _MOST_THREADS)


def in_blocks(size: int, work: Callable[[int, int], None], width: int = BLOCK) -> None:
    """Call `work(start, end)` for every block of `size` numbers. The first error is raised after all threads have stopped."""
    if size <= width:
        if size:
            work(0, size)
        return
    starts = count(0, width)

    def take_blocks() -> None:
        for start in starts:
            if start >= size:
                return
            work(start, min(start + width, size))

    threads = min(cores(), -(-size // width))
    running = [_pool(os.getpid()).submit(take_blocks) for _ in range(threads)]
    wait(running)
    for done in running:
        done.result()


def scratch(size: int) -> Floats:
    """A thread-local scratch buffer; the next call in this thread returns the same one. Fresh pages cost more than the arithmetic."""
    if size > BLOCK:
        return np.empty(size, np.float32)
    if not hasattr(_own, "floats"):
        _own.floats = np.empty(BLOCK, np.float32)
    return _own.floats[:size]


def all_finite(block: Floats) -> bool:
    """Whether all numbers are finite. A dot product with zeros takes two thirds of the time on an idle machine, but BLAS starts threads for
    it, which wait for busy cores: beside another job it took ten times as long."""
    return bool(np.isfinite(block).all())
