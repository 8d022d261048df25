"""DeepSpeed's ZeRO: optimizer state (1), gradients too (2), parameters too (3) sharded over the processes.

DeepSpeed keeps the shards, reduces gradients and clips them; Shoal weighs the batches, drives the learning rate, and reads and writes the
state by the parameters' names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shoal.config import Run
from shoal.config.schema.engine import DeepSpeed
from shoal.engines.base import Engine, tensors_of
from shoal.engines.deepspeed.config import library
from shoal.engines.deepspeed.disk import check_disk_access
from shoal.engines.deepspeed.network import TaskModule, ZeroNetwork
from shoal.engines.fsdp import refuse_several
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.models.compile_rules import exclude_from_compilation
from shoal.tasks import Task


class DeepSpeedEngine(Engine):
    """The task calls DeepSpeed's engine where it would call the network."""

    def __init__(self, run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> None:
        super().__init__(run, task, device, total_steps, world)
        assert isinstance(run.engine, DeepSpeed)
        refuse_several(run, task)
        _check_rest(run, task)
        found = library(device)
        if run.engine.nvme_offload:
            check_disk_access()
        for player in task.players.values():
            player.to(device).train()
        if run.training.compile is True:
            exclude_from_compilation()
            task.compile()
        mesh, limit = init_device_mesh(device.type, (world.size,)), self.clip_limit()
        self.networks = {
            name: ZeroNetwork(found, player, self.chosen[name], run, limit, world, mesh) for name, player in task.players.items()
        }
        self.layouts = {name: network.layout for name, network in self.networks.items()}
        self.optimizers = {name: network.optimizer for name, network in self.networks.items()}
        for name, network in self.networks.items():
            task.players[name] = TaskModule(network.zero, network.model, whole=network.stage < 3)

    # --- gradients ---------------------------------------------------------------------------------

    def _forget(self) -> None:
        for network in self.networks.values():
            network.forget()

    def _backward(self, value: Tensor, player: str, last: bool) -> None:
        self.networks[player].backward(value, last)

    def _slopes(self, player: str) -> Iterator[tuple[str, Tensor]]:
        network = self.networks[player]
        for name in network.trained:
            yield name, network.whole_gradient(name)

    def _step_network(self, name: str, step: float, metrics: dict[str, Tensor], scaled: bool) -> None:
        network, limit = self.networks[name], self.clip_limit()
        network.step(self.rate(name, step), limit)
        if limit is not None:
            norm = network.norm()
            self._note_norm(name, norm, metrics)
            too_large_a_scale = self.settings.precision.kind == "fp16" and bool(network.zero.optimizer.overflow)
            if self.health is not None and not too_large_a_scale:
                self.healthy(float(norm))

    # --- the flat view -----------------------------------------------------------------------------

    def _trained(self) -> Iterator[tuple[ZeroNetwork, nn.Parameter]]:
        for network in self.networks.values():
            for parameter in network.trained.values():
                yield network, parameter

    def wholes(self) -> Iterator[Tensor]:
        for network, parameter in self._trained():
            yield network.master(parameter)

    def load_wholes(self, wholes: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for (network, parameter), value in zip(self._trained(), wholes, strict=True):
                network.replace(parameter, value)

    def apply(self, gradient: Tensor, step: float) -> dict[str, Tensor]:
        parts = torch.split(gradient, [layout.size for layout in self.layouts.values()])
        for network, part in zip(self.networks.values(), parts, strict=True):
            for name, whole in network.layout.views(part):
                network.set_gradient(network.trained[name], whole)
        return self.apply_own(step)

    def finite(self) -> bool:
        return all(bool(whole.isfinite().all()) for whole in self.wholes())

    # --- state -------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        return {f"{player}.{name}": value for player, network in self.networks.items() for name, value in network.weights()}

    def _load_weight(self, name: str, own: Tensor, value: Tensor) -> None:
        player, _, parameter = name.partition(".")
        network = self.networks[player]
        network.replace(dict(tensors_of(network.model))[parameter], value)

    def forget_past(self) -> None:
        for network in self.networks.values():
            network.forget_past()

    def _moments(self, player: str) -> dict[str, Any]:
        return self.networks[player].moments()

    def _load_moments(self, player: str, state: Mapping[str, Any]) -> None:
        self.networks[player].load_moments(state)


def _check_rest(run: Run, task: Task) -> None:
    """Raises ShoalError for what ZeRO cannot do."""
    assert isinstance(run.engine, DeepSpeed)
    if run.engine.nvme_offload and run.logging.track_gradients:
        raise ShoalError("logging.track_gradients: DeepSpeed gives gradients on a disk up with each step")
    if run.engine.nvme_offload and len(task.players) > 1:
        raise ShoalError("engine.nvme_offload: one network can be on the disk, and a value network is a second: take rlhf.algorithm rloo")
    if run.engine.zero_stage == 3 and hasattr(task.players["model"], "value_head"):
        raise ShoalError("rlhf.value: ZeRO-3 gathers a network for its output, which has no value beside it: set rlhf.value to network")
