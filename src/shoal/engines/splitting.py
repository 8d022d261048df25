"""Which layers each stage of a pipeline has: as the settings say, else so that the slowest stage is as quick as it can be."""

from __future__ import annotations

import json
import platform
import time
from typing import Any

import torch
from torch import nn

from shoal.config.schema.engine import Pipeline
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.models.experts import Experts
from shoal.models.staged import layers_in
from shoal.models.stages import depth, ends_of, stage_of
from shoal.scheduling.splitting import Hands, split

_BYTES = 16
"""Bytes of a parameter that is trained: the weight, its gradient, and two moments of an optimizer."""
_ALIKE = 1.5
"""Machines whose measured speeds differ by less count as equally fast: a short measurement is not better than that."""
_SIZE, _TIMES = 256, 8


def bounds_for(settings: Pipeline, model: Any, device: torch.device, world: World) -> list[int]:
    """The first layer of each stage, and the number of layers at the end. All processes must ask, and get the same."""
    count = depth(model)
    if settings.layers:
        return _given(settings.layers, count, world.size)
    if world.size == 1:
        return [0, count]
    layers, head = list(layers_in(stage_of(model, 0, count)).values()), ends_of(model, entry=False)
    machines = [json.loads(text) for text in world.texts(json.dumps([platform.node(), _speed(device), _room(device)]))]
    here = [name for name, _, _ in machines]
    fastest = max(speed for _, speed, _ in machines)
    hands = [Hands(1.0 if fastest / speed < _ALIKE else speed / fastest, room / here.count(name)) for name, speed, room in machines]
    sizes = [_BYTES * sum(one.numel() for one in layer.parameters()) for layer in layers]
    return split([_work(layer) for layer in layers], hands, after=_work(head), sizes=sizes)


def _given(layers: tuple[int, ...], count: int, stages: int) -> list[int]:
    if len(layers) != stages or sum(layers) != count:
        raise ShoalError(
            f"engine.layers names {len(layers)} stages with {sum(layers)} layers in all, and there are {stages} stages for {count} layers"
        )
    return [sum(layers[:stage]) for stage in range(stages + 1)]


def _work(module: nn.Module) -> float:
    """Products for one token: one for each number of a matrix, and of a mixture's experts those that a token goes to."""
    stacks = {id(one): layer for layer in module.modules() if isinstance(layer, Experts) for one in layer.parameters(recurse=False)}
    total = 0.0
    for parameter in module.parameters():
        layer = stacks.get(id(parameter))
        share = 1.0 if layer is None else layer.router.per_token / layer.count
        total += share * parameter.numel() if parameter.dim() > 1 else 0.0
    return total


def _speed(device: torch.device) -> float:
    """Products a second, from a few small ones: the shortest time counts, since others may compute here too."""
    matrix, shortest = torch.ones(_SIZE, _SIZE, device=device), float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        (matrix @ matrix).sum().item()
        shortest = min(shortest, time.perf_counter() - began)
    return _SIZE**3 / max(shortest, 1e-9)


def _room(device: torch.device) -> float:
    """Bytes that are free where parameters are kept; where nobody knows, as many as one likes."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable:"))
        return 1024.0 * int(found.split()[1])
    except (OSError, StopIteration, ValueError):
        return 1e18
