"""Exponential moving average (EMA) of the weights of one process, updated after each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.config.schema.training import Ema

_PIECE = 1 << 24
"""Elements that are exchanged at a time."""


class WeightAverage:
    """The average of tensors that an optimizer steps in place.

    Holds: the first update copies the weights, as torch's `AveragedModel` does; each later one moves the average towards them.
    """

    def __init__(self, settings: Ema, weights: list[Tensor]) -> None:
        self.settings, self.weights = settings, [one.detach() for one in weights]
        self.steps = 0
        """Updates so far."""
        self.values: list[Tensor] = []
        """The averages; empty before the first update."""

    @torch.no_grad()
    def update(self) -> None:
        if not self.steps:
            self.values = [one.clone() for one in self.weights]
        else:
            for value, weight in zip(self.values, self.weights, strict=True):
                value.lerp_(weight, 1 - self.decay)
        self.steps += 1

    @property
    def decay(self) -> float:
        """The decay of the next update: with warm-up small at first, so that the initial weights are soon forgotten."""
        decay = self.settings.decay
        assert decay is not None
        return min(decay, (1 + self.steps) / (10 + self.steps)) if self.settings.warmup else decay

    def restore(self, steps: int, values: list[Tensor]) -> None:
        self.steps, self.values = steps, values

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """For the time of the block the weights are the averages, and the averages the weights."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        for value, weight in zip(self.values, self.weights, strict=True):
            pieces = zip(torch.split(value.view(-1), _PIECE), torch.split(weight.view(-1), _PIECE), strict=True)
            for one, other in pieces:
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)
