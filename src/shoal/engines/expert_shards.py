"""Experts of a mixture that are shared by several ranks (`engine.expert_parallel`).

With world = N · F, N ranks in a row share the experts of every layer: each computes 1/N of them, for the tokens of all N. Each of these
parts is sharded with `fully_shard` over the F ranks that have the same experts. Everything else is sharded over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from shoal.engines.shards import TensorCut
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.models.layers.expert_layer import ExpertLayer
from shoal.models.layers.rank_exchange import RankExchange


class ExpertRanks:
    """This rank among those that share experts, and its load."""

    def __init__(self, ranks: int, device: torch.device, world: World) -> None:
        if world.size % ranks:
            raise ShoalError(f"engine.expert_parallel: {ranks} does not divide the {world.size} processes of this worker")
        self.ranks, self.world = ranks, world
        numbers_NF = torch.arange(world.size).view(-1, ranks).t().contiguous()
        self.mesh = DeviceMesh(device.type, numbers_NF, mesh_dim_names=("experts", "shards"))
        self._exchanges: dict[str, RankExchange] = {}
        """By the name of a layer, of the networks that learn."""
        self._loads: dict[str, Tensor] = {}

    # --- parts of the experts ----------------------------------------------------------------------

    def take_part(self, network: nn.Module, learns: str | None) -> dict[str, torch.Size]:
        """Leave this rank's part of the experts in a network. Returns the shapes of the whole tensors, by their names.

        `learns`: a name for its layers, if its loads are recorded.
        """
        shapes: dict[str, torch.Size] = {}
        part = TensorCut(self.mesh["experts"])
        for prefix, layer in expert_layers(network):
            if layer.count % self.ranks:
                raise ShoalError(f"engine.expert_parallel: {self.ranks} ranks cannot share {layer.count} experts evenly")
            layer.rank_exchange = RankExchange(self.mesh["experts"].get_group())
            if learns is not None:
                self._exchanges[f"{learns}layers/{_number(prefix)}"] = layer.rank_exchange
            for name in layer.per_expert:
                whole = getattr(layer, name)
                if whole is not None:
                    shapes[f"{prefix}.{name}"] = whole.shape
                    setattr(layer, name, nn.Parameter(part.part_of(whole.detach()).clone(), whole.requires_grad))
        return shapes

    def cut(self, shape: torch.Size) -> TensorCut:
        """How a stack of all experts' tensors, of this shape, is cut."""
        return TensorCut(self.mesh, (0, self._along(torch.Size([shape[0] // self.ranks, *shape[1:]]))))

    def _along(self, part: torch.Size) -> int:
        """The dimension along which the ranks that have the same experts cut them: whole experts if that is even, else all of them."""
        ranks = self.mesh["shards"].size()
        return 1 if part[0] % ranks and part[1] % ranks == 0 else 0

    def shard(self, network: nn.Module, settings: dict[str, Any], reshard: bool) -> None:
        """Shard the experts. `settings`: those of `fully_shard` for everything else."""
        own = settings | {"mesh": self.mesh["shards"], "shard_placement_fn": lambda stack: Shard(self._along(stack.shape))}
        for _, layer in expert_layers(network):
            for child in layer.children():  # the router and others that all ranks have; else they would be taken for experts
                if not isinstance(child, FSDPModule) and any(True for _ in child.parameters()):
                    fully_shard(child, reshard_after_forward=reshard, **settings)
            fully_shard(layer, reshard_after_forward=reshard, **own)

    # --- loads -------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        for exchange in self._exchanges.values():
            exchange.rows = 0

    def end_step(self, device: torch.device) -> None:
        """Sum up how many rows the experts of each rank have computed in this step."""
        rows_LW = torch.zeros(len(self._exchanges), self.world.size, device=device)
        rows_LW[:, self.world.rank] = torch.tensor([float(exchange.rows) for exchange in self._exchanges.values()], device=device)
        self._loads = dict(zip(self._exchanges, self.world.add_up(rows_LW), strict=True))

    def figures(self) -> dict[str, Tensor]:
        """By how much the fullest rank's load exceeds the mean. The others wait for it."""
        return {f"{layer}/rank_excess": load_W.max() / load_W.mean().clamp(min=1) - 1 for layer, load_W in self._loads.items()}

    def details(self) -> dict[str, float]:
        """Each rank's share of the rows of a layer."""
        shares = {layer: (load_W / load_W.sum().clamp(min=1)).tolist() for layer, load_W in self._loads.items()}
        return {f"{layer}/rank_load/{rank}": share for layer, load_W in shares.items() for rank, share in enumerate(load_W)}


def expert_layers(network: nn.Module) -> Iterator[tuple[str, ExpertLayer]]:
    """The layers of experts, with their names."""
    yield from ((name, one) for name, one in network.named_modules() if isinstance(one, ExpertLayer))


def _number(prefix: str) -> str:
    """The number of the block in which a layer stands."""
    return next((part for part in prefix.split(".") if part.isdigit()), "0")
