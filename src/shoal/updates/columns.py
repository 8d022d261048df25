"""Work on a stack of vectors [N, D] column by column, in blocks that fit the cache, on all cores.

NumPy lets go of the interpreter inside its loops, so plain threads share the work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
_BLOCK_BYTES = 1 << 20
"""A block of all N rows; a core's own cache holds it."""


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="columns")


def by_blocks(stack_ND: Tensor, combine: Callable[[Floats], Floats]) -> Tensor:
    """`combine` turns a block [N, W] into W numbers; the result is all of them. The block is a copy that may be overwritten."""
    array: Floats = stack_ND.detach().cpu().to(torch.float32).numpy()
    count, size = array.shape
    width = max(256, _BLOCK_BYTES // (4 * count))
    result: Floats = np.empty(size, np.float32)

    def work(start: int) -> None:
        block = np.array(array[:, start : start + width], order="C")
        result[start : start + width] = combine(block)

    list(_pool().map(work, range(0, size, width)))
    return torch.from_numpy(result).to(stack_ND.device)


@lru_cache(maxsize=64)
def network(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs to compare and exchange, in order, that sort `count` values (Batcher's odd-even merge sort)."""
    pairs = []
    width = 1
    while width < count:
        step = width
        while step >= 1:
            for start in range(step % width, count - step, 2 * step):
                for i in range(start, min(start + step, count - step)):
                    if i // (2 * width) == (i + step) // (2 * width):
                        pairs.append((i, i + step))
            step //= 2
        width *= 2
    return tuple(pairs)


def sorted_rows(block_NW: Floats) -> list[Floats]:
    """The rows such that each column is sorted: the same exchanges for all columns, so every one is a pass over two rows."""
    rows = list(block_NW)
    spare = np.empty_like(rows[0])
    for low, high in network(len(rows)):
        np.minimum(rows[low], rows[high], out=spare)
        np.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return rows
