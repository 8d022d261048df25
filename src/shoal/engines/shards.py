"""Which rows of a tensor a process holds where tensors are cut along their first dimension, as torch's `fully_shard` does."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def part_of(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This process's rows of a tensor that it has whole; as torch.chunk cuts, the last may have fewer, or none. A number is not cut."""
    if not whole.dim():
        return whole
    rank, rows = mesh.get_local_rank(), -(-len(whole) // mesh.size())
    return whole[rank * rows : (rank + 1) * rows]


def as_shard(own: Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    """This process's rows as a part of the whole, which checkpoints can put together again."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
