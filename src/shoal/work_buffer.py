"""Memory that an operation on a CPU uses and gives up again before it ends.

If it were allocated each time, small tensors that stay would come to lie where it was, and the next request would not fit there: the
heap of a process grew by a gigabyte while a model of 1.5B int8 weights was restored matrix by matrix.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class WorkBuffer(threading.local):
    """A buffer for each thread and type of numbers. Its content is valid until the same thread takes it again."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, Tensor] = {}

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """That many numbers, of any value."""
        found = self._kept.get(dtype)
        if found is None or len(found) < count:
            with torch.inference_mode(False), torch.device("cpu"):
                found = self._kept[dtype] = torch.empty(count, dtype=dtype)
        return found[:count]
