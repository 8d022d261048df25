"""What every task gives: losses of its networks for a batch, and a judgement on held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

Batch = dict[str, Tensor]


class TaskInfo(Protocol):
    """What a task must know of the data."""

    @property
    def image_shape(self) -> tuple[int, int, int] | None: ...
    @property
    def num_classes(self) -> int | None: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...


class Loss(NamedTuple):
    """What one network is to make smaller, as the mean over the batch, and figures to show."""

    player: str
    value: Tensor
    metrics: dict[str, Tensor]


class Task(Protocol):
    """Losses are yielded one network after the other; the engine takes the gradient of each for its own network only."""

    players: dict[str, nn.Module]
    headline: str
    """The metric of an evaluation that tells most, and is to become smaller unless `higher_is_better`."""
    higher_is_better: bool

    def count(self, batch: Batch) -> int:
        """How much a batch weighs against others: samples, or tokens that count."""
        ...

    def compile(self) -> None:
        """Let torch.compile make the losses faster."""
        ...

    def losses(self, batch: Batch) -> Iterator[Loss]: ...

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Metrics over batches of held-out data. Leaves weights, buffers and random numbers as they were."""
        ...


@runtime_checkable
class Draws(Protocol):
    """A task that can show what it has learned as images."""

    def images(self) -> Tensor: ...


class Mean:
    """Weighted means of several metrics, summed on the device until they are asked for."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weight = 0

    def add(self, metrics: dict[str, Tensor], weight: int) -> None:
        for name, value in metrics.items():
            scaled = value.detach() * weight
            self.sums[name] = self.sums[name] + scaled if name in self.sums else scaled
        self.weight += weight

    def result(self) -> dict[str, float]:
        return {name: float(value) / self.weight for name, value in self.sums.items()} if self.weight else {}
