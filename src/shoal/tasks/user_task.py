"""User-defined losses and metrics, over batches of tensors in any plain structure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import Run
from shoal.config.data_shapes import DataShapes
from shoal.config.schema.task import CustomTask
from shoal.errors import ShoalError
from shoal.tasks.base import IGNORED, Batch, Loss, MetricMeans, Task

LossFunction = Callable[[nn.Module, Any], Any]
"""Returns a scalar tensor, or a mapping with `loss` and further metrics."""
Metric = Callable[[nn.Module, Any], Any]
"""Returns a number for a batch."""
_LABELS = ("label", "labels", "target", "targets", "y")
SAMPLE = "(sample)"
"""The name of the tensor in a batch that is a single tensor. The items of a tuple are named (0), (1) and so on."""


def named(batch: Any) -> Batch:
    """A batch as a mapping from names to tensors, the form in which Shoal passes batches. Raises ShoalError if it holds anything but
    tensors."""
    if isinstance(batch, Tensor):
        return {SAMPLE: batch}
    items = dict(batch) if isinstance(batch, Mapping) else {f"({number})": item for number, item in enumerate(batch)}
    wrong = next((name for name, value in items.items() if not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise ShoalError(
            f"a batch holds {type(items[wrong]).__name__} at `{wrong}`, and only tensors can be trained on: "
            "collate= makes a batch of samples, as a tensor, a tuple of tensors or a dict of tensors"
        )
    return items


def as_given(batch: Batch) -> Any:
    """The form that a batch had before `named`."""
    if SAMPLE in batch:
        return batch[SAMPLE]
    return tuple(batch.values()) if "(0)" in batch else batch


class UserTask(Task):
    """A task with the user's loss function, or with a loss that suits the model and the batch."""

    headline = "loss"

    def __init__(self, players: dict[str, nn.Module], loss: LossFunction | None = None) -> None:
        self.players, self.loss, self.usual = players, loss or usual_loss, loss is None

    def __deepcopy__(self, memo: dict[int, Any]) -> UserTask:
        """Copy the networks. The loss function is shared, with all that it refers to."""
        return UserTask(copy.deepcopy(self.players, memo), None if self.usual else self.loss)

    def count(self, batch: Batch) -> int:
        """Samples; for a language model of transformers, whose mean is over tokens, the tokens that it predicts."""
        ids = batch.get("input_ids")
        if not self.usual or ids is None or batch.get("labels", ids).shape != ids.shape:
            return len(next(iter(batch.values())))
        causal = _predicts_the_next(self.players["model"])
        counted = _labels(batch) if "labels" not in batch and causal else batch.get("labels", ids)
        return int((counted[:, int(causal) :] != IGNORED).sum())

    def losses(self, batch: Batch) -> Iterator[Loss]:
        figures = self._figures(batch)
        yield Loss("model", figures["loss"], figures)

    def _figures(self, batch: Batch) -> dict[str, Tensor]:
        returned = self.loss(self.players["model"], as_given(batch))
        figures = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        value = figures.get("loss")
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            if "loss" not in figures:
                found = f"a dict without `loss` (it has {', '.join(map(str, figures)) or 'nothing'})"
            raise ShoalError(f"loss= must give a tensor with one number, or a dict that has one as `loss`: it gave {found}")
        return {name: torch.as_tensor(figure, device=value.device).squeeze() for name, figure in figures.items()}

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        return {name: value.float() for name, value in self._figures(batch).items()}


class WithMetrics(Task):
    """Any task, with further metrics on held-out data."""

    def __init__(self, task: Task, metrics: Mapping[str, Metric]) -> None:
        self.task, self.metrics = task, dict(metrics)
        self.players, self.headline, self.higher_is_better = task.players, task.headline, task.higher_is_better
        self.draws_images, self.counts_tokens = task.draws_images, task.counts_tokens
        self.compile, self.place_frozen, self.images = task.compile, task.place_frozen, task.images  # type: ignore[method-assign]
        self.join_processes = task.join_processes  # type: ignore[method-assign]

    def count(self, batch: Batch) -> int:
        return self.task.count(batch)

    def losses(self, batch: Batch) -> Iterator[Loss]:
        return self.task.losses(batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> WithMetrics:
        """Copy the networks. The metric functions are shared, with all that they refer to."""
        return WithMetrics(copy.deepcopy(self.task, memo), self.metrics)

    def __getattr__(self, name: str) -> Any:
        """Attributes that only some tasks have, such as a reference model."""
        return getattr(self.__dict__["task"], name)

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        mean = MetricMeans()

        def measured() -> Iterator[Batch]:
            for batch in batches:
                figures = {name: self._figure(name, metric, batch) for name, metric in self.metrics.items()}
                mean.add(figures, self.count(batch))
                yield batch

        return self.task.evaluate(measured()) | mean.result()

    def _figure(self, name: str, metric: Metric, batch: Batch) -> Tensor:
        with torch.no_grad():
            found = metric(self.players["model"], as_given(batch))
        try:
            value = torch.as_tensor(found, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShoalError(f"metrics=: `{name}` must give one number for a batch: it gave {type(found).__name__}") from error
        if value.numel() != 1:
            raise ShoalError(f"metrics=: `{name}` must give one number for a batch: it gave a tensor of shape {tuple(value.shape)}")
        return value.squeeze()


def usual_loss(model: nn.Module, batch: Any) -> Any:
    """The default loss: the model's own loss, cross-entropy for classes, or squared error for numbers."""
    if isinstance(batch, Mapping) and _target(batch) is None:
        return _own_loss(model, batch)
    inputs, labels = _pair(batch)
    output = model(inputs)
    if not isinstance(output, Tensor):
        raise ShoalError(f"the model gives {type(output).__name__}, for which no loss is known: give one with loss=")
    if labels.is_floating_point():
        if output.numel() != labels.numel():
            raise ShoalError(f"the model gives {tuple(output.shape)} for targets of {tuple(labels.shape)}: give the loss with loss=")
        return F.mse_loss(output.view_as(labels), labels)
    loss = F.cross_entropy(output.flatten(0, -2), labels.long().flatten())
    right = (output.argmax(-1) == labels).float().mean()
    return {"loss": loss, "accuracy": right}


def _target(batch: Mapping[str, Tensor]) -> str | None:
    """The name of the targets, where there is one input beside them."""
    return next((name for name in _LABELS if name in batch), None) if len(batch) == 2 and "input_ids" not in batch else None


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping):
        target = _target(batch)
        assert target is not None
        return next(value for name, value in batch.items() if name != target), batch[target]
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise ShoalError("a batch is not a pair of inputs and targets: pass the loss to minimise as loss=")
    return batch


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """The loss that a model of transformers gives with its output. One that predicts the next token needs no labels of its own."""
    arguments: dict[str, Tensor] = dict(batch)
    if "labels" not in arguments and "input_ids" in arguments and _predicts_the_next(model):
        arguments["labels"] = _labels(batch)
    loss = getattr(model(**arguments), "loss", None)
    if loss is None:
        names = ", ".join(f"`{name}`" for name in batch)
        raise ShoalError(f"the model gives no loss of its own for a batch of {names}: give one with loss=, or add `labels`")
    return loss


def _predicts_the_next(model: nn.Module) -> bool:
    """Whether it is a causal language model of transformers, which shifts its labels itself."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    """The tokens themselves, without padding."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    return ids if mask is None else ids.masked_fill(mask == 0, IGNORED)


def build(settings: CustomTask, run: Run, players: dict[str, nn.Module], shapes: DataShapes) -> UserTask:
    """With the loss that suits the model and the batch; a program gives one of its own with `shoal.train(loss=…)`."""
    return UserTask(players)
