"""Positions of a network's experts in the flat weight vector, and of their loads in the buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shoal.engines.single import SingleEngine
from shoal.models.layers.episodic_memory import EpisodicMemory
from shoal.models.layers.expert_layer import ExpertLayer
from shoal.models.moe import Loads
from shoal.models.step_state import StepState
from shoal.updates.episodes import EpisodeRows
from shoal.updates.experts import ExpertBlocks
from shoal.updates.fragments import Span
from shoal.updates.layout import ParameterLayout


def expert_blocks(engine: SingleEngine, cap: float | None, apart: bool = False) -> ExpertBlocks | None:
    """The experts of the engine's networks; None: there are none. `cap`: they are weighed; `apart`: a rule looks at each of them."""
    layers = [one for player in engine.task.players.values() for one in player.modules() if isinstance(one, ExpertLayer)]
    if not layers:
        return None
    spans, at = list[tuple[Span, ...]](), 0
    for name, layout in engine.layouts.items():
        spans += spans_of_experts(engine.task.players[name], layout, at)
        at += layout.size
    if not any(spans):
        return None  # all experts are frozen
    loads_at = next(iter(_places(engine, Loads, lambda kept: [kept.reported_LE])), None)
    biases_at = tuple(_places(engine, Loads, lambda kept: [router.bias_E for router in kept.routers]))
    return ExpertBlocks(tuple(spans), len(layers), layers[0].router.per_token, loads_at, cap, apart, at, biases_at)


def spans_of_experts(network: nn.Module, layout: ParameterLayout, at: int = 0) -> list[tuple[Span, ...]]:
    """The stretches of each expert, layer after layer, in a vector where the network begins at `at`."""
    slots = {slot.name: slot for slot in layout.slots}
    found = list[tuple[Span, ...]]()
    for prefix, module in network.named_modules():
        if isinstance(module, ExpertLayer):
            own = [slots[name] for name in (f"{prefix}.{stack}" for stack in module.per_expert) if name in slots]
            for number in range(module.count):
                starts = [(at + slot.offset + number * (slot.size // module.count), slot.size // module.count) for slot in own]
                found.append(tuple((start, start + size) for start, size in starts))
    return found


def episode_rows(engine: SingleEngine) -> EpisodeRows | None:
    """The episodes that workers report; None: the model has no episodic memory."""
    memories = [one for one in engine.kept if isinstance(one, EpisodicMemory)]
    at = _places(engine, EpisodicMemory, lambda kept: kept.state())
    return EpisodeRows(at[0], *memories[0].received_WR.shape) if at else None


def _places(engine: SingleEngine, kind: type[StepState], wanted: Callable[[Any], list[Tensor]]) -> list[int]:
    """Where the wanted tensors of kept state of a kind begin in the engine's buffers."""
    found = {id(value) for one in engine.kept if isinstance(one, kind) for value in wanted(one)}
    at, places = sum(one.numel() for one in engine.statistics), list[int]()
    for place in (value for one in engine.kept for value in one.state()):
        if id(place) in found:
            places.append(at)
        at += place.numel()
    return places
