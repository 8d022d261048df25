"""Which part of a tensor a process holds where tensors are cut over processes, as torch's `fully_shard` does."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class TensorCut(NamedTuple):
    """How tensors are cut over a mesh of processes."""

    mesh: DeviceMesh
    along: tuple[int, ...] = (0,)
    """For each dimension of the mesh, in turn: the dimension of the tensor that is cut over it."""

    @classmethod
    def of(cls, shard: DTensor) -> TensorCut:
        """The cut that gave this part."""
        return cls(shard.device_mesh, tuple(placement.dim for placement in shard.placements if isinstance(placement, Shard)))

    def part_of(self, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor; as torch.chunk cuts, the last may be smaller, or empty. A number is not cut."""
        if not whole.dim():
            return whole
        for number, dim in enumerate(self.along):
            rank, length = self.mesh.get_local_rank(number), -(-whole.shape[dim] // self.mesh.size(number))
            whole = whole[(slice(None),) * dim + (slice(rank * length, (rank + 1) * length),)]
        return whole

    def as_shard(self, own: Tensor, shape: torch.Size) -> DTensor:
        """This process's part as a part of the whole, which checkpoints can put together again."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(own, self.mesh, [Shard(dim) for dim in self.along], run_check=False, shape=shape, stride=stride)
