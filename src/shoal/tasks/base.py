"""Task: the losses of some networks for a batch, and metrics on held-out data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
IGNORED = -100
"""The label of a token that does not count."""


class Loss(NamedTuple):
    """The loss of one network, as the mean over the batch, and metrics to show."""

    player: str
    value: Tensor
    metrics: dict[str, Tensor]


class StepResult(NamedTuple):
    """Figures of a step. Tensors stay on the device until they are read; of several processes each has its part of their sum."""

    metrics: dict[str, Tensor]
    weight: int
    """Samples or tokens that counted."""
    samples: int


class Task(ABC):
    """Losses of some networks for a batch, and metrics on held-out data."""

    players: dict[str, nn.Module]
    """The networks that learn, by name."""
    headline: str
    """The main metric of an evaluation. A smaller one is better, unless `higher_is_better`."""
    higher_is_better: bool = False
    learns_from_answers: bool = False
    """Whether batches are answers of the model itself, so that it must generate text while it learns."""
    draws_images: bool = False
    """Whether `images` can be called."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """The weight of a batch against others: samples, or tokens that count."""

    @abstractmethod
    def losses(self, batch: Batch) -> Iterator[Loss]:
        """One loss for each network that learns. The engine takes the gradient of each for its own network only."""

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        """Metrics of a batch of held-out data, which `evaluate` averages by the weights of the batches."""
        raise NotImplementedError(f"{type(self).__name__} defines neither `measure` nor `evaluate`")

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Metrics over batches of held-out data. Leaves weights, buffers and random numbers as they were."""
        mean = MetricMeans()
        for batch in batches:
            mean.add(self.measure(batch), self.count(batch))
        return mean.result()

    def compile(self) -> None:
        """Let torch.compile make the losses faster."""
        for player in self.players.values():
            player.compile()

    def place_frozen(self, hold: Callable[[nn.Module], nn.Module]) -> None:
        """Called when the engine holds the networks: `hold` places networks that do not learn beside them."""
        return

    def answer_only(self, finder: Any) -> None:
        """Called in a worker that answers prompts while the coordinator learns. `finder` finds passages to read; None: there are none."""
        return

    def images(self) -> Tensor:
        """Samples of what was learned, as images [N, C, H, W] in 0..1."""
        raise NotImplementedError


class MetricMeans:
    """Weighted means of several metrics, summed on the device until they are read."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weight = 0

    def add(self, metrics: dict[str, Tensor], weight: int) -> None:
        for name, value in metrics.items():
            scaled = value * weight
            self.sums[name] = self.sums[name] + scaled if name in self.sums else scaled
        self.weight += weight

    def result(self) -> dict[str, float]:
        return {name: float(value) / self.weight for name, value in self.sums.items()} if self.weight else {}

    def take(self, add_up: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, float]:
        """The means over all processes; from here on anew. `add_up` sums the metrics of all processes, of which each knows the weight."""
        means = {name: float(value) / self.weight for name, value in add_up(self.sums).items()}
        self.sums, self.weight = {}, 0
        return means
