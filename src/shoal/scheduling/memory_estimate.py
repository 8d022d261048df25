"""Estimate of the memory for training a model, from the settings and the number of parameters."""

from __future__ import annotations

from typing import NamedTuple

from shoal.config import Run
from shoal.config.schema.training import TorchOptimizer

_GB = 1e9
_FLOAT = 4
_STATES = {"SGD": 0, "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2, "Muon": 1}
"""Optimizer state per parameter, in numbers; 2 for optimizers that are not listed."""
_ROWS_OF_BLOCK = 17
"""Activations per token that a transformer block keeps for its backward pass, in units of the width: 34 bytes in half precision."""
_ROWS_OF_LSTM = 8
"""The same for an LSTM layer: four gates, the cell, its hyperbolic tangent, the output, and the input."""


class MemoryEstimate(NamedTuple):
    """Memory for training, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def gb(self) -> float:
        return sum(self) / _GB

    def shared(self, devices: int) -> MemoryEstimate:
        """Memory of each device if weights, gradients and optimizer state are sharded and activations are not."""
        weights, gradients, optimizer = (-(-part // devices) for part in self[:3])
        return MemoryEstimate(weights, gradients, optimizer, self.activations)


def training_memory(run: Run, parameters: int, vocabulary: int = 0, frozen_bytes: int = 0) -> MemoryEstimate:
    """Memory of a worker with one process. Trained weights, gradients and optimizer state are 32-bit; activations are those of one batch.

    `vocabulary`: vocabulary size of a language model. `frozen_bytes`: memory of the weights that are not trained.
    """
    kept = _activations(run, parameters, vocabulary, run.training.batch_size or 1, getattr(run.model, "num_layers", None))
    return MemoryEstimate(_FLOAT * parameters + frozen_bytes, _FLOAT * parameters, _FLOAT * _states(run) * parameters, kept)


def stage_memory(run: Run, parameters: int, copied: int, layers: int, vocabulary: int, under_way: int) -> MemoryEstimate:
    """Memory of one pipeline stage, with the activations of `under_way` micro-batches at a time.

    `copied`: size of a tied matrix that another stage steps; `vocabulary`: 0 for a stage that computes no logits.
    """
    engine, batch = run.engine, run.training.batch_size or 1
    each = -(-batch // min(batch, getattr(engine, "micro_batches", 1)))
    kept = under_way * _activations(run, parameters, vocabulary, each, layers)
    held = _FLOAT * (parameters + copied)
    return MemoryEstimate(held, held, _FLOAT * _states(run) * parameters, kept)


def _states(run: Run) -> int:
    """Optimizer state per parameter, in numbers."""
    optimizer = run.training.optimizer
    return (_STATES.get(optimizer.name, 2) or int(bool(optimizer.momentum))) if isinstance(optimizer, TorchOptimizer) else 2


def _activations(run: Run, parameters: int, vocabulary: int, batch: int, layers: int | None) -> int:
    """Activations that the forward pass of `batch` samples keeps for the backward pass, in bytes. For a model without a hidden width the
    bound follows from its number of weights."""
    model = run.model
    width = getattr(model, "hidden_size", None)
    if not width or not layers:
        return _FLOAT * min(batch * parameters, batch * 4096 + 2 * parameters)
    length = run.data.sequence_length or getattr(model, "max_seq_len", None) or 1
    heads = getattr(model, "num_heads", None)
    rows = (_ROWS_OF_BLOCK if heads else _ROWS_OF_LSTM) * width
    attention = 2.5 * heads * length if heads else 0
    blocks = layers * (rows + attention)
    if run.training.gradient_checkpointing:  # each block keeps its input, and one at a time is computed again
        blocks = layers * width + rows + attention
    return int(_FLOAT * batch * length * (blocks + width + 2 * vocabulary))
