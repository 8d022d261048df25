"""Estimate of the memory for training a model, from the settings and the number of parameters."""

from __future__ import annotations

from typing import NamedTuple

from shoal.config import Run
from shoal.config.schema.model import Moe, Transformer
from shoal.config.schema.training import TorchOptimizer

_GB = 1e9
_FLOAT = 4
_STATES = {"SGD": 0, "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2, "Muon": 1}
"""Optimizer state per parameter, in numbers; 2 for optimizers that are not listed."""
_ROWS_OF_BLOCK = 17
"""Activations per token that a transformer block keeps for its backward pass, in units of the width: 34 bytes in half precision. Nine of
them are those of the attention and the normalisations, and eight those of GELU, whose inner width is four times the width."""
_ROWS_WITHOUT_FEED_FORWARD = {"gelu": 9, "swiglu": 8}
_INNER = {"gelu": 2, "swiglu": 4}
"""Activations per token that a feed-forward layer keeps, in units of its inner width."""
_ROWS_OF_ROUTING, _ROWS_OF_ROUTE, _INNER_OF_EXPERT = 3, 1.3, {"gelu": 3, "swiglu": 5}
"""Activations that experts keep: per token, and per expert of a token, in units of the width and of the expert's. Measured on a CPU in 32
bits, with 2, 4 and 8 experts a token."""
_ROWS_OF_LSTM = 8
"""The same for an LSTM layer: four gates, the cell, its hyperbolic tangent, the output, and the input."""


_LOGITS_ON_CPU = 1 << 24
"""Logits and their slopes that a CPU holds at a time, in numbers."""


class BlockShape(NamedTuple):
    """The transformer blocks of a network; `heads` is 0 for layers of an LSTM."""

    layers: int
    width: int
    heads: int
    kept: float | None = None
    """Activations per token that a block keeps, on average; None: as many as a block with GELU."""


def numbers_kept(model: Transformer) -> float:
    """Activations per token that a block keeps for its backward pass, on average over the blocks."""
    kind, width = model.feed_forward, model.hidden_size
    inner = model.intermediate_size or 4 * width
    dense = _ROWS_WITHOUT_FEED_FORWARD[kind] * width + _INNER[kind] * inner
    if not isinstance(model, Moe):
        return dense
    experts = model.experts
    routed = experts.per_token * (_ROWS_OF_ROUTE * width + _INNER_OF_EXPERT[kind] * (experts.intermediate_size or inner))
    shared = _INNER[kind] * (experts.shared_size or 0)
    mixed = (_ROWS_WITHOUT_FEED_FORWARD[kind] + _ROWS_OF_ROUTING) * width + routed + shared
    return mixed + (dense - mixed) * min(experts.dense_layers, model.num_layers) / model.num_layers


class MemoryEstimate(NamedTuple):
    """Memory for training, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def gb(self) -> float:
        return sum(self) / _GB

    def shared(self, devices: int, gathered: tuple[int, int]) -> MemoryEstimate:
        """Memory of each device if weights, gradients and optimizer state are sharded and activations are not. `gathered`: bytes of weights
        and gradients that it has whole at a time."""
        weights, gradients, optimizer = (-(-part // devices) for part in self[:3])
        return MemoryEstimate(weights + gathered[0], gradients + gathered[1], optimizer, self.activations)


def training_memory(
    run: Run, parameters: int, vocabulary: int = 0, frozen_bytes: int = 0, blocks: BlockShape | None = None
) -> MemoryEstimate:
    """Memory of a worker with one process. Trained weights, gradients and optimizer state are 32-bit; activations are those of one batch.

    `vocabulary`: vocabulary size of a language model. `frozen_bytes`: memory of the weights that are not trained.
    `blocks`: those of the network, where the settings do not name them.
    """
    blocks = blocks or _blocks_of(run, getattr(run.model, "num_layers", None))
    kept = _activations(run, parameters, vocabulary, run.training.batch_size or 1, blocks)
    return MemoryEstimate(_FLOAT * parameters + frozen_bytes, _FLOAT * parameters, _FLOAT * _states(run) * parameters, kept)


def stage_memory(run: Run, parameters: int, copied: int, layers: int, vocabulary: int, under_way: int) -> MemoryEstimate:
    """Memory of one pipeline stage, with the activations of `under_way` micro-batches at a time.

    `copied`: size of a tied matrix that another stage steps; `vocabulary`: 0 for a stage that computes no logits.
    """
    engine, batch = run.engine, run.training.batch_size or 1
    each = -(-batch // min(batch, getattr(engine, "micro_batches", 1)))
    kept = under_way * _activations(run, parameters, vocabulary, each, _blocks_of(run, layers))
    held = _FLOAT * (parameters + copied)
    return MemoryEstimate(held, held, _FLOAT * _states(run) * parameters, kept)


def _states(run: Run) -> int:
    """Optimizer state per parameter, in numbers."""
    optimizer = run.training.optimizer
    return (_STATES.get(optimizer.name, 2) or int(bool(optimizer.momentum))) if isinstance(optimizer, TorchOptimizer) else 2


def _blocks_of(run: Run, layers: int | None) -> BlockShape | None:
    width, heads = getattr(run.model, "hidden_size", None), getattr(run.model, "num_heads", None)
    kept = numbers_kept(run.model) if isinstance(run.model, Transformer) else None
    return BlockShape(layers, width, heads or 0, kept) if width and layers else None


def _activations(run: Run, parameters: int, vocabulary: int, batch: int, blocks: BlockShape | None) -> int:
    """Activations that the forward pass of `batch` samples keeps for the backward pass, in bytes. For a model without blocks the bound
    follows from its number of weights."""
    if blocks is None:
        return _FLOAT * min(batch * parameters, batch * 4096 + 2 * parameters)
    layers, width, heads, kept_by_block = blocks
    length = run.data.sequence_length or getattr(run.model, "max_seq_len", None) or 1
    each = (kept_by_block or (_ROWS_OF_BLOCK if heads else _ROWS_OF_LSTM) * width) + 2.5 * heads * length
    kept = layers * each
    if run.training.gradient_checkpointing:  # each block keeps its input, and one at a time is computed again
        kept = layers * width + each
    logits = 2 * vocabulary * batch * length
    if run.training.device == "cpu":
        logits = min(logits, _LOGITS_ON_CPU)
    return int(_FLOAT * (batch * length * (kept + width) + logits))
