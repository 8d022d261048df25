"""What the devices of a worker exchange in a step, what each of them gathers, and how many of them best share the experts of a mixture."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from shoal.config import Run
from shoal.config.schema.engine import Fsdp
from shoal.engines.blocks import blocks_of
from shoal.models.layers.expert_layer import ExpertLayer

_HALF = ("bf16", "fp16")
"""Precisions in which `fully_shard` gathers parameters in 16 bits; gradients are summed in 32."""
_BITS = 32
_PASSES_OF_ROWS, _RECOMPUTED = 4, 2
"""Exchanges of the experts' rows in a layer: to the experts and back, in both passes; two more where activations are computed again."""
_GATHERED_BLOCKS = 2
"""The block that is computed, and the next one, which is gathered meanwhile."""


class ShardedSizes(NamedTuple):
    """A network as `fully_shard` sees it, in numbers of weights."""

    others: int
    """Weights that are no experts'."""
    experts: int
    outside: int
    """Weights outside of blocks, which stay gathered."""
    block: int
    """The largest block, without experts."""
    block_experts: int
    """Most experts of a block."""
    rows: int
    """Numbers that a token sends to its experts, over all layers."""
    counts: tuple[int, ...]
    """Experts of each layer."""


def sizes_of(network: nn.Module) -> ShardedSizes:
    blocks = [(_size(block), _size_of_experts(block)) for block in blocks_of(network)]
    whole, experts = _size(network), _size_of_experts(network)
    layers = [one for one in network.modules() if isinstance(one, ExpertLayer)]
    return ShardedSizes(
        whole - experts,
        experts,
        whole - sum(size for size, _ in blocks),
        max((size - own for size, own in blocks), default=0),
        max((own for _, own in blocks), default=0),
        sum(layer.router.per_token * layer.down.shape[1] for layer in layers),
        tuple(layer.count for layer in layers),
    )


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _size_of_experts(module: nn.Module) -> int:
    layers = (one for one in module.modules() if isinstance(one, ExpertLayer))
    return sum(value.numel() for layer in layers for name in layer.per_expert if (value := getattr(layer, name)) is not None)


def copied_mbit(run: Run, parameters: int) -> float:
    """What each device exchanges for a batch if all have all weights: gradients, added up and distributed once a step."""
    return 2e-6 * _BITS * parameters / run.training.gradient_accumulation_steps


def sharded_mbit(run: Run, sizes: ShardedSizes, devices: int) -> float:
    """What each device exchanges for a batch under fsdp: weights gathered for both passes, gradients, and the rows of shared experts."""
    sharing, gathered = sharing_of(run), 16 if run.training.precision.kind in _HALF else _BITS
    of_experts = sizes.experts / sharing if devices > sharing else 0  # a device that has its experts alone gathers none
    weights = (2 * gathered + _BITS) * (sizes.others + of_experts)
    passes = _PASSES_OF_ROWS + (_RECOMPUTED if run.training.gradient_checkpointing else 0)
    tokens = (run.training.batch_size or 1) * (run.data.sequence_length or getattr(run.model, "max_seq_len", None) or 1)
    bits = _BITS if run.training.precision.kind == "fp32" else 16
    return 1e-6 * (weights + passes * bits * tokens * sizes.rows * (1 - 1 / sharing))


def gathered_bytes(run: Run, sizes: ShardedSizes) -> tuple[int, int]:
    """Weights that a device gathers at a time under fsdp, and their gradients."""
    each = 2 if run.training.precision.kind in _HALF else 4
    block = sizes.block + sizes.block_experts // sharing_of(run)
    return each * (sizes.outside + _GATHERED_BLOCKS * block), each * (sizes.outside + block)


def sharing_of(run: Run) -> int:
    """Devices that share experts."""
    return run.engine.expert_parallel if isinstance(run.engine, Fsdp) else 1


def sharings(sizes: ShardedSizes, devices: int) -> list[int]:
    """How many of these devices can share the experts: 1, and each number that divides both."""
    most = math.gcd(devices, *sizes.counts) if sizes.counts else 1
    return [number for number in range(1, most + 1) if most % number == 0]
