"""Computes the gradients of many virtual workers in one call.

A worker's gradient is needed when its step ends, and its weights do not change before that. So steps that have begun are collected, and
when the first of them ends, all are computed together: `torch.func.vmap` maps the task's loss over stacked weights and batches. Each
worker then takes its own optimizer step.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.config import Run
from shoal.engines import SingleEngine, StepResult
from shoal.models.layers.embedding import TokenEmbedding
from shoal.scheduling import memory_estimate
from shoal.tasks import Batch, Task

_MOST_BYTES = 1e9
"""Memory limit of one call, for all its workers."""
_TOLERANCE = 1e-3
"""Largest error of a batched gradient, relative to the same gradient computed alone, at which the model counts as mappable."""

_VMAP_FALLBACK = "There is a performance drop"
"""Beginning of torch's warning that vmap falls back to a loop, which is no faster than separate calls."""


class PrefetchedFeed:
    """A feed with a queue of batches that were read ahead."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed
        self.drawn: deque[Batch] = deque()

    def __next__(self) -> Batch:
        return self.drawn.popleft() if self.drawn else next(self._feed)

    def state_dict(self) -> dict[str, Any]:
        """Position after the batches that were read ahead."""
        return self._feed.state_dict()


class BatchedEngine(SingleEngine):
    """An engine that uses gradients and steps that `BatchedSteps` has computed, where there are any."""

    def __init__(self, run: Run, task: Task, total_steps: int) -> None:
        super().__init__(run, task, torch.device("cpu"), total_steps)
        self.ready: deque[tuple[Tensor | None, StepResult]] = deque()
        """Gradients with their metrics; the gradient is None for an optimizer step that was taken already."""

    def gradients(self, batches: list[Batch]) -> StepResult:
        if not self.ready:
            return super().gradients(batches)
        gradient, result = self.ready.popleft()
        assert gradient is not None
        self._attach(gradient)
        return result

    def take_steps(self, feed: Iterator[Batch], accumulation: int, most: int) -> tuple[StepResult, int]:
        return (self.ready.popleft()[1], 1) if self.ready else super().take_steps(feed, accumulation, most)

    def step_along(self, gradient: Tensor, result: StepResult) -> StepResult:
        """Take an optimizer step with this gradient."""
        self._attach(gradient)
        return result._replace(metrics=result.metrics | self.apply_own(self.step_count))

    def _attach(self, gradient: Tensor) -> None:
        self._gradient.copy_(gradient)
        for network in self.networks.values():
            network.attach_gradients()


class PendingStep(NamedTuple):
    """A step that a worker has begun."""

    feed: PrefetchedFeed
    steps: int
    """Inner optimizer steps; 0: only a gradient is computed."""


class _StepBatch(NamedTuple):
    """A batch of a worker's step, and its weight in the step's mean."""

    engine: BatchedEngine
    batch: Batch
    share: float


class _Loss(nn.Module):
    """The loss of a task as a module, for `functional_call` with other weights."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        task.fixed_shapes = True
        self.network = next(iter(task.players.values()))
        for module in self.network.modules():
            if isinstance(module, TokenEmbedding):
                module.may_lend = False

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = next(iter(self.task.losses(batch)))
        return loss.value, {name: figure.detach() for name, figure in loss.metrics.items()}


class BatchedSteps:
    """Collects the steps that workers have begun, and computes them together."""

    def __init__(self, run: Run, engine: BatchedEngine, vocabulary: int, leased: bool) -> None:
        """`engine`: one with the workers' model, used for its loss and its size."""
        self.accumulation = run.training.gradient_accumulation_steps
        self.reason = reason_not_batched(run, engine, leased)
        """Why workers compute one by one; empty: they compute together."""
        self.calls = self.computed = 0
        """Number of calls so far, and of batches in them."""
        self._pending: dict[BatchedEngine, PendingStep] = {}
        self._loss, self._verified = _Loss(engine.task), False
        each = memory_estimate.training_memory(run, engine.vector.numel(), vocabulary)
        self._max_rows = max(1, int(_MOST_BYTES // sum(each)))

    def begin(self, engine: BatchedEngine, feed: PrefetchedFeed, steps: int) -> None:
        if not self.reason:
            self._pending[engine] = PendingStep(feed, steps)

    def drop(self, engine: BatchedEngine) -> None:
        """Cancel the step that this worker has begun."""
        self._pending.pop(engine, None)
        engine.ready.clear()

    def finish(self, engine: BatchedEngine) -> None:
        """Compute the step of this worker, whose time is over, together with all others that have begun."""
        if engine not in self._pending:
            return
        pending, self._pending = self._pending, {}
        for number in range(max(max(1, one.steps) for one in pending.values())):
            rows = [row for other, one in pending.items() if number < max(1, one.steps) for row in self._rows(other, one)]
            if not self._compute(rows, pending):
                return

    def _rows(self, engine: BatchedEngine, step: PendingStep) -> list[_StepBatch]:
        batches = [next(step.feed) for _ in range(self.accumulation)]
        counts = [engine.task.count(batch) for batch in batches]
        return [_StepBatch(engine, batch, count / max(1, sum(counts))) for batch, count in zip(batches, counts, strict=True)]

    def _compute(self, rows: list[_StepBatch], pending: dict[BatchedEngine, PendingStep]) -> bool:
        """Compute a step of each engine. Returns False where the model cannot be mapped; the feeds then get their batches back."""
        found: dict[BatchedEngine, list[tuple[_StepBatch, Tensor, dict[str, Tensor]]]] = {}
        for group in _same_shapes(rows):
            for at in range(0, len(group), self._max_rows):
                computed = self._gradients(group[at : at + self._max_rows])
                if computed is None:
                    for row in rows:
                        pending[row.engine].feed.drawn.append(row.batch)
                    return False
                for row, gradient, metrics in computed:
                    found.setdefault(row.engine, []).append((row, gradient, metrics))
        for engine, parts in found.items():
            self._deliver(engine, pending[engine], parts)
        return True

    def _deliver(self, engine: BatchedEngine, step: PendingStep, parts: list[tuple[_StepBatch, Tensor, dict[str, Tensor]]]) -> None:
        """Average over the batches of a step; then store the gradient, or take the optimizer step."""
        gradient = _sum([(row.share, {"": part}) for row, part, _ in parts])[""]
        metrics = _sum([(row.share, values) for row, _, values in parts])
        batches = [row.batch for row, _, _ in parts]
        samples = sum(len(next(iter(batch.values()))) for batch in batches)
        result = StepResult(metrics, max(1, sum(engine.task.count(batch) for batch in batches)), samples)
        if step.steps:
            engine.ready.append((None, engine.step_along(gradient, result)))
        else:
            step.feed.drawn.extend(batches)
            engine.ready.append((gradient, result))

    def _gradients(self, rows: list[_StepBatch]) -> list[tuple[_StepBatch, Tensor, dict[str, Tensor]]] | None:
        """The gradient and the metrics of each row; None where the model cannot be mapped, with the reason in `reason`."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=_VMAP_FALLBACK)
                gradients, metrics = self._mapped(rows)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError, UserWarning) as error:
            self.reason = f"torch cannot map this model over workers ({str(error).strip().splitlines()[0].split('. ')[0]})"
            return None
        if not self._verified and not self._equals_single(rows[0], gradients[0]):
            self.reason = "mapped over workers, this model gives different gradients"
            return None
        self.calls, self.computed, self._verified = self.calls + 1, self.computed + len(rows), True
        return [(row, gradients[i], {name: value[i] for name, value in metrics.items()}) for i, row in enumerate(rows)]

    def _mapped(self, rows: list[_StepBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients [rows, weights] and metrics. Weights that are equal in all rows are not stacked."""
        first = rows[0].engine
        (network,) = first.networks.values()
        shared = all(row.engine is first or torch.equal(row.engine.vector, first.vector) for row in rows)
        stacked = first.vector[None] if shared else torch.stack([row.engine.vector for row in rows])
        named = {f"network.{slot.name}": stacked[:, slot.offset : slot.offset + slot.size] for slot in network.layout.slots}
        shapes = {f"network.{slot.name}": slot.shape for slot in network.layout.slots}
        weights = {name: part[0].view(shapes[name]) if shared else part.reshape(-1, *shapes[name]) for name, part in named.items()}
        batch = {name: torch.stack([row.batch[name] for row in rows]) for name in rows[0].batch}

        def loss(weights: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            return functional_call(self._loss, weights, (batch,))

        mapped = vmap(grad(loss, has_aux=True), in_dims=(None if shared else 0, 0))
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no batching rule for stacked weights
            gradients, metrics = mapped(weights, batch)
        return torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1), metrics

    def _equals_single(self, row: _StepBatch, gradient: Tensor) -> bool:
        """Whether a row's gradient equals the one that its engine computes alone, within the tolerance."""
        SingleEngine.gradients(row.engine, [row.batch])
        alone = row.engine.gradient
        return bool(torch.linalg.vector_norm(gradient - alone) <= _TOLERANCE * torch.linalg.vector_norm(alone) + 1e-12)

    def format_counts(self) -> str:
        """How gradients were computed, for the report's table."""
        if self.reason:
            return f"one by one: {self.reason}"
        return f"{self.computed:,} in {self.calls:,} calls, {self.computed / self.calls:.1f} at once" if self.calls else ""


def reason_not_batched(run: Run, engine: SingleEngine, leased: bool) -> str:
    """Why the steps of a run's workers cannot be computed together; empty: they can."""
    training, modules = run.training, [module for player in engine.task.players.values() for module in player.modules()]
    reasons = {
        "workers learn from units that they lease": leased,
        "there are several networks": len(engine.networks) > 1,
        "the model keeps statistics or other state of its batches": bool(engine.statistics or engine.kept),
        "the model drops activations at random": any(map(_has_dropout, modules)),
        f"training.precision is {training.precision.kind}": training.precision.kind != "fp32",
        "training.gradient_checkpointing computes activations again": training.gradient_checkpointing,
        "training.compile is on": training.compile is True,
        "the gradient of each sample is clipped": run.updates.privacy.enabled and run.updates.privacy.unit == "sample",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _has_dropout(module: nn.Module) -> bool:
    share = getattr(module, "p", 0.0) if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, float) and share > 0


def _same_shapes(rows: list[_StepBatch]) -> list[list[_StepBatch]]:
    """The rows in groups whose batches have the same shapes."""
    groups: dict[tuple[Any, ...], list[_StepBatch]] = {}
    for row in rows:
        groups.setdefault(tuple((name, value.shape) for name, value in row.batch.items()), []).append(row)
    return list(groups.values())


def _sum(parts: list[tuple[float, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The weighted sum of tensors by name; a single part is returned unweighted."""
    if len(parts) == 1:
        return dict(parts[0][1])
    total: dict[str, Tensor] = {}
    for share, values in parts:
        for name, value in values.items():
            total[name] = total[name] + share * value if name in total else share * value
    return total
