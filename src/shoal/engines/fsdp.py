"""FSDP engine: parameters, gradients and optimizer state are sharded over the processes with torch's `fully_shard`, block by block. Ranks
may share the experts of a mixture instead of gathering all of them (expert_shards.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from shoal.config import Run
from shoal.config.schema.engine import Fsdp
from shoal.engines.base import Engine, tensors_of
from shoal.engines.blocks import blocks_of
from shoal.engines.expert_shards import ExpertRanks, expert_layers
from shoal.engines.optim import named_state, optimizers
from shoal.engines.shards import TensorCut
from shoal.engines.single import statistics
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.models.compile_rules import exclude_from_compilation
from shoal.tasks import Task
from shoal.updates.layout import ParameterLayout

_ENTRANCES = ("hidden", "next_logits")
"""Methods of a model that compute, besides `forward`: sharded parameters must be gathered for these too."""


class FsdpEngine(Engine):
    """Each process holds its part of every parameter; a block is gathered when it is needed.

    The optimizer steps those parts as plain tensors, so it must work element by element: then the result is that of whole parameters.
    """

    def __init__(self, run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> None:
        super().__init__(run, task, device, total_steps, world)
        assert isinstance(run.engine, Fsdp)
        for settings in self.chosen.values():
            _check(run, task, settings.name, device)
        self.sharding = Sharding(run, device, world)
        several = len(task.players) > 1
        self.shards = {name: ShardedNetwork(player, self.sharding, f"{name}." if several else "") for name, player in task.players.items()}
        if self.sharding.experts is not None and not any(shards.experts for shards in self.shards.values()):
            raise ShoalError("engine.expert_parallel: the model has no experts that devices could share: set it to 1")
        self.layouts = {name: shards.layout for name, shards in self.shards.items()}
        if run.training.compile is True:
            exclude_from_compilation()
            task.compile()
        self.optimizers = {name: optimizers.make(self.chosen[name], list(shards.rows.values())) for name, shards in self.shards.items()}
        self.scaler = torch.amp.GradScaler(device.type, enabled=run.training.precision.kind == "fp16")

    def hold(self, network: nn.Module) -> nn.Module:
        self.sharding.shard(network)
        return network

    # --- gradients ---------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        super()._begin_step()
        if self.sharding.experts is not None:
            self.sharding.experts.begin_step()

    def _end_step(self, metrics: dict[str, Tensor]) -> None:
        super()._end_step(metrics)
        if self.sharding.experts is not None:
            self.sharding.experts.end_step(self.device)
            metrics |= {name: value / self.world.size for name, value in self.sharding.experts.figures().items()}

    def figures(self) -> dict[str, float]:
        return super().figures() | (self.sharding.experts.details() if self.sharding.experts is not None else {})

    def _forget(self) -> None:
        for shards in self.shards.values():
            shards.forget()

    def _backward(self, value: Tensor, player: str, last: bool) -> None:
        value.backward()  # type: ignore[no-untyped-call]

    def _gather(self, player: str) -> None:
        """Each process has its rows of the whole gradient: they become the optimizer's."""
        self.shards[player].gather()
        if self.scaler.is_enabled():
            self._agree_on_overflow(self.shards[player].gradients())

    def _agree_on_overflow(self, gradients: list[Tensor]) -> None:
        """A step is skipped by all or by none."""
        bad = torch.stack([(~row.isfinite()).any() for row in gradients]).any()
        if self.world.any(bool(bad)):
            for row in gradients:
                row.fill_(torch.inf)

    def _norm(self, player: str) -> Tensor:
        squares = torch.stack(torch._foreach_norm(self.shards[player].gradients())).square().sum().to(self.device)
        dist.all_reduce(squares)
        return squares.sqrt()

    def _shrink(self, player: str, factor: Tensor) -> None:
        gradients = self.shards[player].gradients()
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def _slopes(self, player: str) -> Iterator[tuple[str, Tensor]]:
        shards = self.shards[player]
        for name, row in shards.rows.items():
            own = torch.zeros_like(row) if row.grad is None else row.grad
            yield name, shards.as_shard(name, own.to(self.device)).full_tensor()

    # --- the flat view -----------------------------------------------------------------------------

    def wholes(self) -> Iterator[Tensor]:
        for shards in self.shards.values():
            for name, row in shards.rows.items():
                yield shards.as_shard(name, row.detach().to(self.device)).full_tensor()

    def _parts(self) -> Iterator[tuple[TensorCut, nn.Parameter]]:
        for shards in self.shards.values():
            yield from ((shards.cuts[name], row) for name, row in shards.rows.items())

    def _rows(self) -> Iterator[nn.Parameter]:
        for shards in self.shards.values():
            yield from shards.rows.values()

    def load_wholes(self, wholes: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for (cut, row), value in zip(self._parts(), wholes, strict=True):
                row.copy_(cut.part_of(value))

    def apply(self, gradient: Tensor, step: float) -> dict[str, Tensor]:
        own = torch.split(gradient, [shards.layout.size for shards in self.shards.values()])
        for shards, part in zip(self.shards.values(), own, strict=True):
            for name, whole in shards.layout.views(part):
                shards.rows[name].grad = shards.cuts[name].part_of(whole).to(shards.rows[name].device, copy=True)
        return self.apply_own(step)

    def finite(self) -> bool:
        return not self.world.any(not all(bool(row.isfinite().all()) for row in self._rows()))

    # --- state -------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for player, network in self.task.players.items():
            for module in network.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # an evaluation leaves some parameters gathered
            experts = self.shards[player].experts
            for name, value in tensors_of(network):
                found[f"{player}.{name}"] = self.sharding.whole(value, experts[name]) if name in experts else value
        return found

    def _stepped(self) -> list[Tensor]:
        return list(self._rows())

    def _named_average(self, values: list[Tensor]) -> dict[str, Tensor]:
        names = [(player, name) for player, shards in self.shards.items() for name in shards.rows]
        return {f"{player}.{name}": self.shards[player].as_shard(name, value) for (player, name), value in zip(names, values, strict=True)}

    def _average_of(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        names = [f"{player}.{name}" for player, shards in self.shards.items() for name in shards.rows]
        return [cut.part_of(named[name]).to(row.device, copy=True) for name, (cut, row) in zip(names, self._parts(), strict=True)]

    def _load_weight(self, name: str, own: Tensor, value: Tensor) -> None:
        if isinstance(own, DTensor):
            own.to_local().copy_(TensorCut.of(own).part_of(value))
        else:
            own.copy_(value)

    def _moments(self, player: str) -> dict[str, Any]:
        shards = self.shards[player]
        state = named_state.of_parameters(self.optimizers[player], shards.rows)
        for name, own in state["moments"].items():
            state["moments"][name] = {key: shards.as_shard(name, value) for key, value in own.items()}
        return state

    def _load_moments(self, player: str, state: Mapping[str, Any]) -> None:
        """Moments are contiguous, as the parameters are: torch's fused optimizers step both by their places in memory."""
        shards = self.shards[player]
        own = {
            name: {key: shards.cuts[name].part_of(value).contiguous() for key, value in values.items()}
            for name, values in state["moments"].items()
        }
        named_state.load_parameters(self.optimizers[player], shards.rows, {"shared": state["shared"], "moments": own})


class ShardedNetwork:
    """This process's part of one network that learns."""

    def __init__(self, network: nn.Module, sharding: Sharding, prefix: str) -> None:
        """`prefix`: of the names of its figures."""
        trained = {name: parameter.shape for name, parameter in network.named_parameters() if parameter.requires_grad}
        self.layout = ParameterLayout((name, tuple(shape)) for name, shape in trained.items())
        self._shapes = trained
        self.experts = sharding.shard(network, prefix)
        """The shapes of the whole stacks of experts that ranks share, by name, also of those that are not trained."""
        self.cuts = {name: sharding.cut(shape, name in self.experts) for name, shape in trained.items()}
        network.train()
        self.parameters: dict[str, DTensor] = {
            name: _sharded(parameter) for name, parameter in network.named_parameters() if name in trained
        }
        self.rows = {name: nn.Parameter(_sharded(parameter.detach()).to_local()) for name, parameter in self.parameters.items()}

    def forget(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self.rows[name].grad = None

    def gather(self) -> None:
        """The gradient of this process's rows becomes the optimizer's."""
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            self.rows[name].grad = torch.zeros_like(self.rows[name]) if gradient is None else _sharded(gradient).to_local()

    def gradients(self) -> list[Tensor]:
        return [row.grad for row in self.rows.values() if row.grad is not None]

    def as_shard(self, name: str, own: Tensor) -> DTensor:
        """Values for this process's part of a parameter, as a part of those for the whole."""
        return self.cuts[name].as_shard(own, self._shapes[name])


def _check(run: Run, task: Task, optimizer: str, device: torch.device) -> None:
    refuse_several(run, task)
    if optimizer in optimizers.SHAPED:
        raise ShoalError(f"training.optimizer.name: {optimizer} looks at whole matrices, and fsdp cuts them: take AdamW, or the engine ddp")
    if isinstance(run.engine, Fsdp) and run.engine.cpu_offload and device.type != "cuda":
        raise ShoalError(f"engine.cpu_offload: on {device.type} parameters are in main memory already")


def refuse_several(run: Run, task: Task) -> None:
    """Refuse networks that are trained against each other, or have BatchNorm: engines that shard support neither."""
    if "model" not in task.players:
        name = run.chosen_task.kind
        raise ShoalError(f"engine.kind: {run.engine.kind} does not train networks against each other (task {name}): take ddp")
    if any(True for player in task.players.values() for _ in statistics(player)):
        raise ShoalError(f"engine.kind: {run.engine.kind} does not keep the figures of BatchNorm the same in all processes: take ddp")


class Sharding:
    """How networks are sharded over the processes."""

    def __init__(self, run: Run, device: torch.device, world: World) -> None:
        assert isinstance(run.engine, Fsdp)
        self.run, self.engine, self.mesh = run, run.engine, init_device_mesh(device.type, (world.size,))
        self.experts = ExpertRanks(self.engine.expert_parallel, device, world) if self.engine.expert_parallel > 1 else None

    def cut(self, shape: torch.Size, shared: bool) -> TensorCut:
        """How a parameter is cut. `shared`: it is a stack of experts that ranks share."""
        return self.experts.cut(shape) if shared and self.experts is not None else TensorCut(self.mesh)

    def whole(self, own: Tensor, shape: torch.Size) -> DTensor:
        """A stack of experts, with its shape over all ranks that share them, from what `fully_shard` made of this rank's part."""
        return self.cut(shape, True).as_shard(_sharded(own.detach()).to_local(), shape)

    def shard(self, model: nn.Module, learns: str | None = None) -> dict[str, torch.Size]:
        """Shard every block of a list of blocks by itself, then what is left. Returns the shapes of the stacks of experts that ranks share.

        `learns`: a prefix for the figures of a network that learns.
        """
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.run.training.precision.kind)
        settings: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy() if self.engine.cpu_offload else OffloadPolicy(),
        }
        reshard = self.engine.reshard_after_forward
        shapes = self.experts.take_part(model, learns) if self.experts is not None else {}
        for module in model.modules() if half else ():
            if getattr(module, "full_precision", False):  # its weights are not rounded either
                fully_shard(module, **settings | {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)})
        if self.experts is not None:
            self.experts.shard(model, settings, reshard)
        for block in blocks_of(model):
            fully_shard(block, reshard_after_forward=reshard, **settings)
        fully_shard(model, reshard_after_forward=False, **settings)  # what is outside the blocks is used all the time
        _finish_sharding(model)
        if self.experts is not None:
            _gather_ahead(model)
        return shapes


def _finish_sharding(model: nn.Module) -> None:
    """Let gradients be summed, and sharded parameters be gathered for all methods that compute."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the plain sum, which every backend has
    for name in _ENTRANCES:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def _gather_ahead(model: nn.Module) -> None:
    """Let each block begin to gather the next one. torch does so where the host is ahead of a GPU, but an exchange of rows waits for the
    GPU's numbers."""
    before = model
    for block in blocks_of(model):
        if isinstance(before, FSDPModule):
            before.set_modules_to_forward_prefetch(
                [one for one in (block, *dict(expert_layers(block)).values()) if isinstance(one, FSDPModule)]
            )
        before = block


def _sharded(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor
