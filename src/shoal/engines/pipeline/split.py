"""Assignment of layers to pipeline stages: as the settings or the tasks say, otherwise such that the slowest stage is as fast as
possible."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.config import Run
from shoal.config.schema.engine import Pipeline
from shoal.engines.single import free_memory
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.models.huggingface.frozen_weights import FrozenLinear
from shoal.models.layers.expert_layer import ExpertLayer
from shoal.models.partial_model import layers_in
from shoal.models.split_model import layer_count, make_ends, make_stage
from shoal.scheduling.layer_split import MachineSpec, split
from shoal.scheduling.task_stages import bounds_by_share, stage_shares

_BYTES = 16
"""Bytes of a parameter that is trained: the weight, its gradient, and two moments of an optimizer."""
_ALIKE = 1.5
"""Machines whose measured speeds differ by less count as equally fast: a short measurement is not better than that."""
_SIZE, _TIMES = 256, 8
_UNKNOWN_MEMORY = 1e18
"""Bytes: where the free memory is unknown, it bounds no stage."""


class LayerSizes(NamedTuple):
    """A model by its layers. Sizes are numbers of parameters, work is products for one token."""

    sizes: list[int]
    before: int
    """The size of what stands before the first layer."""
    after: int
    """The size of what stands after the last layer, without a matrix that is also before the first."""
    copied: int
    """The size of such a matrix, of which the last stage has a copy."""
    work: list[float]
    work_after: float

    @property
    def size(self) -> int:
        return self.before + sum(self.sizes) + self.after

    def size_of(self, first: int, last: int) -> int:
        """The size of a stage."""
        ends = (self.before if first == 0 else 0) + (self.after if last == len(self.sizes) else 0)
        return sum(self.sizes[first:last]) + ends

    def work_of(self, first: int, last: int) -> float:
        return sum(self.work[first:last]) + (self.work_after if last == len(self.sizes) else 0.0)


def layers_of(model: Any) -> LayerSizes:
    """A model by its layers. Raises ShoalError for one that cannot be cut."""
    layers = list(layers_in(make_stage(model, 0, layer_count(model))).values())
    sizes, whole = [_size(layer) for layer in layers], _size(model)
    before, head = _size(make_ends(model, after=False)), make_ends(model, before=False)
    after = whole - sum(sizes) - before
    return LayerSizes(sizes, before, after, max(0, _size(head) - after), [_work(layer) for layer in layers], _work(head))


def bounds_for(run: Run, layers: LayerSizes, device: torch.device, world: World) -> list[int]:
    """The first layer of each stage, and the number of layers at the end. All processes must ask, and get the same."""
    assert isinstance(run.engine, Pipeline)
    count = len(layers.sizes)
    if run.engine.layers:
        return _given(run.engine.layers, count, world.size)
    if run.placed:
        return _shared_out(run, layers, device, world)
    if world.size == 1:
        return [0, count]
    machines = _machines(device, world)
    fastest = max(speed for _, speed, _ in machines)
    specs = [MachineSpec(1.0 if fastest / speed < _ALIKE else speed / fastest, free_bytes) for _, speed, free_bytes in machines]
    return split(layers.work, specs, after=layers.work_after, sizes=[_BYTES * size for size in layers.sizes])


def _machines(device: torch.device, world: World) -> list[tuple[str, float, float]]:
    """The machine of each stage: its name, its speed, and the bytes that are free for the stage."""
    own = [world.stage, platform.node(), _speed(device), free_memory(device) or _UNKNOWN_MEMORY]
    found = [json.loads(text) for text in world.texts(json.dumps(own))]
    names = [name for _, name, _, _ in found]
    return [(name, speed, free_bytes / names.count(name)) for _, name, speed, free_bytes in sorted(found)]


def _shared_out(run: Run, layers: LayerSizes, device: torch.device, world: World) -> list[int]:
    """The bounds that the tasks' shares come to. Raises ShoalError where a stage has too little free memory on its machine."""
    parts = stage_shares(run.scheduler.tasks)
    if len(parts) != world.size:
        raise ShoalError(f"the tasks are {len(parts)} stages, each for a process of its own, and there are {world.size} processes")
    bounds = bounds_by_share(layers.sizes, [part.share for part in parts], layers.before, layers.after)
    for part, (first, last), (name, _, free_bytes) in zip(parts, pairwise(bounds), _machines(device, world), strict=True):
        if (needs := _BYTES * layers.size_of(first, last)) > free_bytes:
            raise ShoalError(
                f"the stage `{part.id}` needs {needs / 1e9:.3g} GB of memory, and {name} has {free_bytes / 1e9:.3g} GB free for it"
            )
    return bounds


def _given(layers: tuple[int, ...], count: int, stages: int) -> list[int]:
    if len(layers) != stages or sum(layers) != count:
        raise ShoalError(
            f"engine.layers names {len(layers)} stages with {sum(layers)} layers in all, and there are {stages} stages for {count} layers"
        )
    return [sum(layers[:stage]) for stage in range(stages + 1)]


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _work(module: nn.Module) -> float:
    """Products for one token: one for each number of a matrix, and of a mixture's experts those that a token goes to."""
    return sum(used for weight, used in numbers_used(module) if weight.dim() > 1)


def numbers_used(module: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """Each weight, and how many of its numbers a token meets: of a mixture's experts those that it goes to; of a weight in few bits as many
    as it stands for."""
    stacks = {id(one): layer for layer in module.modules() if isinstance(layer, ExpertLayer) for one in layer.parameters(recurse=False)}
    in_few_bits = {place: count for one in module.modules() if isinstance(one, FrozenLinear) for place, count in one.numbers().items()}
    for weight in module.parameters():
        if id(weight) in in_few_bits:
            yield weight, in_few_bits[id(weight)]
            continue
        layer = stacks.get(id(weight))
        yield weight, weight.numel() * (1.0 if layer is None else layer.router.per_token / layer.count)


def _speed(device: torch.device) -> float:
    """Products a second, from a few small ones: the shortest time counts, since others may compute here too."""
    matrix, shortest = torch.ones(_SIZE, _SIZE, device=device), float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        (matrix @ matrix).sum().item()
        shortest = min(shortest, time.perf_counter() - began)
    return _SIZE**3 / max(shortest, 1e-9)
