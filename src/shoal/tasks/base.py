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
    counts_tokens: bool = False
    """Whether `count` counts tokens."""
    learns_from_answers: bool = False
    """Whether batches are answers of the model itself, so that it must generate text while it learns."""
    draws_images: bool = False
    """Whether `images` can be called."""
    fixed_shapes: bool = False
    """Whether all tokens of a batch must go through the whole network, as compilers and torch.func need it; else a CPU may leave
    out padding, and the logits of tokens that do not count."""
    evaluates_in_training_mode: bool = False
    """Whether the networks compute the same in training and in evaluation, and stay in training mode, for which they are compiled."""

    add_up: Callable[[Tensor], Tensor] = staticmethod(lambda values: values)
    """The sum over all processes that step together, each of which must call this."""

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

    def join_processes(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Called by an engine of several processes: `add_up` sums over them."""
        self.add_up = add_up

    def answer_only(self, finder: Any) -> None:
        """Called in a worker that answers prompts while the coordinator learns. `finder` finds passages to read; None: there are none."""
        return

    def images(self) -> Tensor:
        """Samples of what was learned, as images [N, C, H, W] in 0..1."""
        raise NotImplementedError


class MetricMeans:
    """Weighted means of several metrics, summed on the device until they are read.

    A metric that some rows of a batch do not have is named `metric/share`, and holds the mean over all rows with 0 for the others; the
    metric `share` is the share of the rows that have it. It is read as `metric`: the mean over the rows that have it, if there were any.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weight = 0

    def add(self, metrics: dict[str, Tensor], weight: int) -> None:
        for name, value in metrics.items():
            scaled = value * weight
            self.sums[name] = self.sums[name] + scaled if name in self.sums else scaled
        self.weight += weight

    def means(self) -> dict[str, Tensor]:
        """The metrics with their names as they were added."""
        return {name: value / self.weight for name, value in self.sums.items()} if self.weight else {}

    def result(self) -> dict[str, float]:
        return _of_those_that_have_it({name: float(value) for name, value in self.means().items()})

    def take(self, add_up: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, float]:
        """The means over all processes; from here on anew. `add_up` sums the metrics of all processes, of which each knows the weight."""
        means = {name: float(value) / self.weight for name, value in add_up(self.sums).items()}
        self.sums, self.weight = {}, 0
        return _of_those_that_have_it(means)


def _of_those_that_have_it(means: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in means.items():
        metric, _, share = name.partition("/")
        if share not in means:
            found[name] = value
        elif means[share]:
            found[metric] = value / means[share]
    return found
