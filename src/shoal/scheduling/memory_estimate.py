"""How much memory a worker takes to train a model: a pure estimate, from the settings and the number of parameters."""

from __future__ import annotations

from typing import NamedTuple

from shoal.config import Run

_GB = 1e9
_FLOAT = 4
_STATES = {"SGD": 0, "Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adagrad": 1, "Adadelta": 2, "Muon": 1}
"""Numbers that an optimizer keeps for each parameter. Of one that is not here two are assumed."""
_ROWS_OF_BLOCK = 17
"""Rows as wide as the model that a transformer block keeps of each token for its backward pass: 34 bytes in half precision."""
_ROWS_OF_LSTM = 8
"""The same for a layer of an LSTM: four gates, the cell, its hyperbolic tangent, the output, and the input."""


class MemoryEstimate(NamedTuple):
    """Bytes that training takes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def gb(self) -> float:
        return sum(self) / _GB

    def shared(self, devices: int) -> MemoryEstimate:
        """What each of some devices takes that share all but the activations of their own batches."""
        weights, gradients, optimizer = (-(-part // devices) for part in self[:3])
        return MemoryEstimate(weights, gradients, optimizer, self.activations)


def training_memory(run: Run, parameters: int, vocabulary: int = 0, frozen: int = 0) -> MemoryEstimate:
    """What one worker of one process takes. Weights, gradients and the optimizer are 32-bit; activations are those of one batch.

    `vocabulary`: tokens that a language model chooses from. `frozen`: weights beside the parameters, which are used and not trained.
    """
    kept = _activations(run, parameters, vocabulary, run.training.batch_size or 1, getattr(run.model, "num_layers", None))
    return MemoryEstimate(_FLOAT * (parameters + frozen), _FLOAT * parameters, _FLOAT * _states(run) * parameters, kept)


def stage_memory(run: Run, parameters: int, copied: int, layers: int, vocabulary: int, under_way: int) -> MemoryEstimate:
    """What one stage of a pipeline takes, which keeps the activations of so many micro-batches at a time.

    `copied`: numbers of a matrix that another stage steps; `vocabulary`: 0 for a stage that makes no logits.
    """
    engine, batch = run.engine, run.training.batch_size or 1
    each = -(-batch // min(batch, getattr(engine, "micro_batches", 1)))
    kept = under_way * _activations(run, parameters, vocabulary, each, layers)
    held = _FLOAT * (parameters + copied)
    return MemoryEstimate(held, held, _FLOAT * _states(run) * parameters, kept)


def _states(run: Run) -> int:
    """Numbers that the optimizer keeps for each parameter."""
    optimizer = run.training.optimizer
    return _STATES.get(optimizer.name, 2) or int(bool(optimizer.momentum))


def _activations(run: Run, parameters: int, vocabulary: int, batch: int, layers: int | None) -> int:
    """What the forward pass of so many samples and layers leaves for the backward pass. A model without layers of a width keeps no more
    than it has weights."""
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
