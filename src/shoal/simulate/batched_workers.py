"""Computes the gradients of many virtual workers in one call.

A worker's gradient is needed when its step is over, and its weights stay as they are until then. So those who have begun a step wait, and
when the first of them is done, the steps of all are computed together: `torch.func` maps the task's loss over a stack of weights and
batches. The optimizer's step is each worker's own.
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
"""What the workers of one call may take together."""
_NEAR = 1e-3
"""So near to a gradient that was computed by itself the same one of a group must be, against its length: else the model does something that
a group cannot."""

_ONE_AFTER_THE_OTHER = "There is a performance drop"
"""How torch begins to tell that it takes one after the other, which each can do by itself."""


class PrefetchedFeed:
    """A feed some of whose next batches were drawn already."""

    def __init__(self, feed: Any) -> None:
        self._feed = feed
        self.drawn: deque[Batch] = deque()

    def __next__(self) -> Batch:
        batch: Batch = self.drawn.popleft() if self.drawn else next(self._feed)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where it stands when all that was drawn is used."""
        state: dict[str, Any] = self._feed.state_dict()
        return state


class BatchedEngine(SingleEngine):
    """An engine whose gradients, or whose steps, may have been computed together with those of others."""

    def __init__(self, run: Run, task: Task, total_steps: int) -> None:
        super().__init__(run, task, torch.device("cpu"), total_steps)
        self.ready: deque[tuple[Tensor | None, StepResult]] = deque()
        """Gradients with their figures; a step that was taken has no gradient any more."""

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
        """Take a step with a gradient that was computed for this engine."""
        self._attach(gradient)
        return result._replace(metrics=result.metrics | self.apply_own(self.step_count))

    def _attach(self, gradient: Tensor) -> None:
        self._gradient.copy_(gradient)
        for network in self.networks.values():
            network.attach_gradients()


class PendingStep(NamedTuple):
    """What a worker has begun."""

    feed: PrefetchedFeed
    steps: int
    """Steps of its own optimizer; 0: it wants a gradient, and takes none."""


class _StepBatch(NamedTuple):
    """A batch of a worker's step, and its share in that step."""

    engine: BatchedEngine
    batch: Batch
    share: float


class _Loss(nn.Module):
    """The loss of a task as a function of its network's weights."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.network = next(iter(task.players.values()))
        for module in self.network.modules():
            if isinstance(module, TokenEmbedding):
                module.may_lend = False

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = next(iter(self.task.losses(batch)))
        return loss.value, {name: figure.detach() for name, figure in loss.metrics.items()}


class BatchedSteps:
    """Those who have begun a step, and what came of it."""

    def __init__(self, run: Run, engine: BatchedEngine, vocabulary: int, leased: bool) -> None:
        """`engine`: like those of the workers."""
        self.accumulation = run.training.gradient_accumulation_steps
        self.reason = reason_not_batched(run, engine, leased)
        """Why workers compute one by one; empty: they need not."""
        self.calls = self.computed = 0
        """Calls that were made, and batches that they were about."""
        self._asked: dict[BatchedEngine, PendingStep] = {}
        self._whole, self._tried = _Loss(engine.task), False
        each = memory_estimate.training_memory(run, engine.vector.numel(), vocabulary)
        self._most = max(1, int(_MOST_BYTES // sum(each)))

    def begin(self, engine: BatchedEngine, feed: PrefetchedFeed, steps: int) -> None:
        if not self.reason:
            self._asked[engine] = PendingStep(feed, steps)

    def drop(self, engine: BatchedEngine) -> None:
        """Cancel the step that this worker has begun."""
        self._asked.pop(engine, None)
        engine.ready.clear()

    def finish(self, engine: BatchedEngine) -> None:
        """A worker is done with what it began: compute it, and with it what all others have begun."""
        if engine not in self._asked:
            return
        asked, self._asked = self._asked, {}
        for number in range(max(max(1, one.steps) for one in asked.values())):
            rows = [row for who, one in asked.items() if number < max(1, one.steps) for row in self._rows(who, one)]
            if not self._compute(rows, asked):
                return

    def _rows(self, engine: BatchedEngine, asked: PendingStep) -> list[_StepBatch]:
        batches = [next(asked.feed) for _ in range(self.accumulation)]
        counts = [engine.task.count(batch) for batch in batches]
        return [_StepBatch(engine, batch, count / max(1, sum(counts))) for batch, count in zip(batches, counts, strict=True)]

    def _compute(self, rows: list[_StepBatch], asked: dict[BatchedEngine, PendingStep]) -> bool:
        """Compute a step of each engine. False: they cannot be computed together, and each gets its batches back."""
        found: dict[BatchedEngine, list[tuple[_StepBatch, Tensor, dict[str, Tensor]]]] = {}
        for alike in _alike(rows):
            for at in range(0, len(alike), self._most):
                group = alike[at : at + self._most]
                made = self._gradients(group)
                if made is None:
                    for row in rows:
                        asked[row.engine].feed.drawn.append(row.batch)
                    return False
                for row, gradient, metrics in made:
                    found.setdefault(row.engine, []).append((row, gradient, metrics))
        for engine, parts in found.items():
            self._hand_over(engine, asked[engine], parts)
        return True

    def _hand_over(self, engine: BatchedEngine, asked: PendingStep, parts: list[tuple[_StepBatch, Tensor, dict[str, Tensor]]]) -> None:
        """Add up the batches of a step; then keep the gradient, or take the step."""
        gradient = _sum([(row.share, {"": slope}) for row, slope, _ in parts])[""]
        metrics = _sum([(row.share, told) for row, _, told in parts])
        batches = [row.batch for row, _, _ in parts]
        samples = sum(len(next(iter(batch.values()))) for batch in batches)
        result = StepResult(metrics, max(1, sum(engine.task.count(batch) for batch in batches)), samples)
        if asked.steps:
            engine.ready.append((None, engine.step_along(gradient, result)))
        else:
            asked.feed.drawn.extend(batches)
            engine.ready.append((gradient, result))

    def _gradients(self, rows: list[_StepBatch]) -> list[tuple[_StepBatch, Tensor, dict[str, Tensor]]] | None:
        """The gradient of each row, and its figures; None where the model does not let itself be mapped."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=_ONE_AFTER_THE_OTHER)
                gradients, metrics = self._mapped(rows)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError, UserWarning) as error:
            self.reason = f"torch cannot map this model over workers ({str(error).strip().splitlines()[0].split('. ')[0]})"
            return None
        if not self._tried and not self._as_alone(rows[0], gradients[0]):
            self.reason = "mapped over workers this model gives other gradients"
            return None
        self.calls, self.computed, self._tried = self.calls + 1, self.computed + len(rows), True
        return [(row, gradients[i], {name: value[i] for name, value in metrics.items()}) for i, row in enumerate(rows)]

    def _mapped(self, rows: list[_StepBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradients [rows, weights] and figures. Where all have the same weights, these are not copied."""
        first = rows[0].engine
        (network,) = first.networks.values()
        shared = all(row.engine is first or torch.equal(row.engine.vector, first.vector) for row in rows)
        stacked = first.vector[None] if shared else torch.stack([row.engine.vector for row in rows])
        named = {f"network.{slot.name}": stacked[:, slot.offset : slot.offset + slot.size] for slot in network.layout.slots}
        shapes = {f"network.{slot.name}": slot.shape for slot in network.layout.slots}
        weights = {name: part[0].view(shapes[name]) if shared else part.reshape(-1, *shapes[name]) for name, part in named.items()}
        batch = {name: torch.stack([row.batch[name] for row in rows]) for name in rows[0].batch}

        def loss(weights: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            value: tuple[Tensor, dict[str, Tensor]] = functional_call(self._whole, weights, (batch,))
            return value

        mapped = vmap(grad(loss, has_aux=True), in_dims=(None if shared else 0, 0))
        with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for a stack of weights
            slopes, metrics = mapped(weights, batch)
        return torch.cat([slope.flatten(1) for slope in slopes.values()], dim=1), metrics

    def _as_alone(self, row: _StepBatch, gradient: Tensor) -> bool:
        """Whether a row's gradient is what its engine computes by itself."""
        SingleEngine.gradients(row.engine, [row.batch])
        alone = row.engine.gradient
        return bool(torch.linalg.vector_norm(gradient - alone) <= _NEAR * torch.linalg.vector_norm(alone) + 1e-12)

    def told(self) -> str:
        """For people: how gradients were computed."""
        if self.reason:
            return f"one by one: {self.reason}"
        return f"{self.computed:,} in {self.calls:,} calls, {self.computed / self.calls:.1f} at once" if self.calls else ""


def reason_not_batched(run: Run, engine: SingleEngine, leased: bool) -> str:
    """Why workers of a run cannot compute together; empty: nothing speaks against it."""
    training, modules = run.training, [module for player in engine.task.players.values() for module in player.modules()]
    reasons = {
        "workers learn from units that they lease": leased,
        "there are several networks": len(engine.networks) > 1,
        "the model keeps statistics or other state of its batches": bool(engine.statistics or engine.kept),
        "the model drops activations at random": any(map(_drops, modules)),
        f"training.precision is {training.precision.kind}": training.precision.kind != "fp32",
        "training.gradient_checkpointing computes activations again": training.gradient_checkpointing,
        "training.compile is on": training.compile,
        "the gradient of each sample is clipped": run.updates.privacy.enabled and run.updates.privacy.unit == "sample",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _drops(module: nn.Module) -> bool:
    share = getattr(module, "p", 0.0) if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, float) and share > 0


def _alike(rows: list[_StepBatch]) -> list[list[_StepBatch]]:
    """Rows whose batches have the same shapes."""
    groups: dict[tuple[Any, ...], list[_StepBatch]] = {}
    for row in rows:
        groups.setdefault(tuple((name, value.shape) for name, value in row.batch.items()), []).append(row)
    return list(groups.values())


def _sum(parts: list[tuple[float, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The weighted sum of figures by name; of one part, what is there."""
    if len(parts) == 1:
        return dict(parts[0][1])
    total: dict[str, Tensor] = {}
    for share, told in parts:
        for name, value in told.items():
            total[name] = total[name] + share * value if name in total else share * value
    return total
