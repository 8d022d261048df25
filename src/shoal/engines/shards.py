"""Which rows of a tensor a process holds where tensors are cut along their first dimension, as torch's `fully_shard` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def own_rows(length: int, rank: int, size: int) -> slice:
    """As torch.chunk cuts: the last may have fewer, or none."""
    rows = -(-length // size)
    return slice(min(rank * rows, length), min((rank + 1) * rows, length))


def part_of(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This process's rows of a tensor that it has whole. A number is not cut."""
    return whole[own_rows(whole.shape[0], mesh.get_local_rank(), mesh.size())] if whole.dim() else whole


def as_shard(own: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Any:
    """This process's rows as a part of the whole, which checkpoints can put together again."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
