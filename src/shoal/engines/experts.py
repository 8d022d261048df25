"""Where a network's experts lie in the flat vector, and their loads in what travels beside it."""

from __future__ import annotations

from torch import nn

from shoal.engines.single import SingleEngine
from shoal.models.experts import Experts
from shoal.models.moe import Loads
from shoal.updates.experts import ExpertBlocks
from shoal.updates.fragments import Span
from shoal.updates.layout import Layout


def expert_blocks(engine: SingleEngine, cap: float | None, apart: bool = False) -> ExpertBlocks | None:
    """The experts of the engine's networks; None: there are none, or nobody weighs them (`cap`) or looks at each of them (`apart`)."""
    layers = [one for player in engine.task.players.values() for one in player.modules() if isinstance(one, Experts)]
    if not layers or not (cap is not None or apart):
        return None
    spans, at = list[tuple[Span, ...]](), 0
    for name, layout in engine.layouts.items():
        spans += spans_of_experts(engine.task.players[name], layout, at)
        at += layout.size
    return ExpertBlocks(tuple(spans), len(layers), layers[0].router.per_token, 0 if cap is None else _loads_at(engine), cap)


def spans_of_experts(network: nn.Module, layout: Layout, at: int = 0) -> list[tuple[Span, ...]]:
    """The stretches of each expert, layer after layer, in a vector where the network begins at `at`."""
    slots = {slot.name: slot for slot in layout.slots}
    found = list[tuple[Span, ...]]()
    for prefix, module in network.named_modules():
        if isinstance(module, Experts):
            own = [slots[name] for name in (f"{prefix}.{stack}" for stack in module.per_expert) if name in slots]
            for number in range(module.count):
                starts = [(at + slot.offset + number * (slot.size // module.count), slot.size // module.count) for slot in own]
                found.append(tuple((start, start + size) for start, size in starts))
    return found


def _loads_at(engine: SingleEngine) -> int:
    """Where the loads begin in the engine's buffers."""
    (loads,) = (one for one in engine.kept if isinstance(one, Loads))
    at = sum(one.numel() for one in engine.statistics)
    for place in (value for one in engine.kept for value in one.state()):
        if place is loads.reported_LE:
            return at
        at += place.numel()
    raise AssertionError("the network does not report its loads")
