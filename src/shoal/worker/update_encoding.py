"""Encoding of updates: from batches to frames that may be sent. A gradient is checked to be finite, clipped, blurred with noise and
encoded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.config.schema.updates import Updates
from shoal.errors import ShoalError
from shoal.protocol.frames import frame_of
from shoal.tasks import Batch, StepResult
from shoal.updates import clipping, codecs, privacy

_ALL = slice(None)
MOST_POISONED = 50
"""Gradients in a row that may be not finite. After that the worker stops: the fault is in this worker or in the run."""


class WorkerEngine(Protocol):
    """The part of an engine's interface that workers use."""

    device: torch.device
    step_count: int

    @property
    def vector(self) -> Tensor: ...
    def changed(self) -> None:
        """Must be called after `vector` was written to."""

    @property
    def phases(self) -> Any:
        """The engine's `PhaseTimes`."""

    @property
    def layouts(self) -> Sized:
        """The parameter layouts, one for each network."""

    def expect(self, moved: Tensor) -> None:
        """Set the expected change of the weights by the next version."""

    @property
    def gradient(self) -> Tensor: ...
    def gradients(self, batches: list[Batch]) -> StepResult: ...
    def take_steps(self, feed: Iterator[Batch], accumulation: int, most: int) -> tuple[StepResult, int]:
        """Take at least one step and at most `most`. Returns the metrics of all of them, and their number."""

    def gradients_by_sample(self, batches: list[Batch], limit: float) -> StepResult: ...
    def unscale(self) -> None: ...
    def apply_own(self, step: float) -> Any: ...
    @property
    def buffers(self) -> Tensor: ...
    def take_report(self) -> Tensor: ...
    def load_buffers(self, values: Tensor) -> None: ...
    def learning_rates(self) -> dict[str, float]: ...
    def forget_past(self) -> None: ...


class UpdateEncoder:
    """Prepares a worker's updates, in this order: clip, check, noise, codec."""

    def __init__(self, engine: WorkerEngine, updates: Updates) -> None:
        self.engine, self.updates = engine, updates
        self.poisoned = 0
        self._in_a_row = 0
        self.residual = codecs.residual_for(updates.codec, engine.vector.numel())
        """The codec's residual: the part of the updates that has not been sent yet."""
        self._noise = torch.Generator()
        self._noise.seed()  # from the system's entropy: predictable noise would hide nothing

    @property
    def _by_sample(self) -> bool:
        return self.updates.privacy.enabled and self.updates.privacy.unit == "sample"

    def gradients(self, batches: list[Batch]) -> StepResult:
        """Compute the engine's gradient and prepare it for copying."""
        if self._by_sample:
            assert self.updates.clip_norm is not None  # checked by the configuration's rules
            return self.engine.gradients_by_sample(batches, self.updates.clip_norm)
        result = self.engine.gradients(batches)
        self.engine.unscale()
        return result

    def limit(self, vector: Tensor) -> bool:
        """Clip the vector. Returns False if it is not finite: such an update must never be sent."""
        limit = None if self._by_sample else self.updates.clip_norm
        norm = clipping.clip_(vector, limit) if limit is not None else clipping.norm(vector)
        if math.isfinite(norm):
            self._in_a_row = 0
            return True
        self.poisoned += 1
        self._in_a_row += 1
        if self._in_a_row > MOST_POISONED:
            raise ShoalError(f"{MOST_POISONED} gradients in a row were not finite: lower the learning rate, or check this worker's data")
        return False

    def frames(self, vector: Tensor, samples: int, span: slice = _ALL) -> list[memoryview]:
        """Add noise and encode. The networks' statistics come last. `span`: the fragment of the weights that the vector covers."""
        if self.updates.privacy.enabled:
            self._blur(vector, samples)
        residual = None if self.residual is None else self.residual[span]
        frames: list[memoryview] = list(codecs.encode(self.updates.codec, vector, residual))
        report = self.engine.take_report()
        return [*frames, frame_of(report.numpy())] if report.numel() else frames

    def _blur(self, vector: Tensor, samples: int) -> None:
        """Add noise, scaled to the most that one sample can change: a mean over clipped samples by its share of the clip norm."""
        assert self.updates.clip_norm is not None
        reach = self.updates.clip_norm / samples if self._by_sample else self.updates.clip_norm
        privacy.add_noise_(vector, reach, self.updates.privacy.noise_multiplier, self._noise)
