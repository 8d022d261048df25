"""Samples that are numbers. Processes that load ahead import this file and no test."""

from __future__ import annotations

from typing import Any

import torch

from shoal.data.interfaces import Samples
from shoal.errors import ShoalError


class Numbers(Samples):
    """Each sample is its own number."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Any) -> dict[str, torch.Tensor]:
        index = torch.as_tensor(indices)
        if self.broken is not None and self.broken in index:
            raise ShoalError(f"sample {self.broken} is broken")
        return {"number": index}
