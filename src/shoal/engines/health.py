"""Gradient health: a clip value on a schedule, detection of exploding gradients, and of steps and losses that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.config.schema.training import GradientHealth
from shoal.engines.world import PendingSum, World
from shoal.errors import ShoalError

MOST_SKIPPED = 100
"""Steps in a row that may be skipped before the run gives up."""


class HealthMonitor:
    """Decides for each step the clip value, whether to skip it, and how much to lower the learning rate. Counts these events."""

    def __init__(self, settings: GradientHealth) -> None:
        self.settings = settings
        self.explosions = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.reductions = 0

    def clip_limit(self, step: int, max_norm: float | None) -> float:
        """The largest gradient norm at a step. During the warm-up the schedule alone decides; afterwards the smaller of its final value and
        `max_norm`, since a `max_norm` that counted from the start would hide a schedule which begins above it."""
        settings = self.settings
        if step < settings.warmup_steps:
            return settings.initial_clip_value + (settings.final_clip_value - settings.initial_clip_value) * step / settings.warmup_steps
        return settings.final_clip_value if max_norm is None else min(settings.final_clip_value, max_norm)

    def observe(self, norm: float) -> bool:
        """Whether a step with this gradient norm may be taken."""
        finite, exploded = math.isfinite(norm), norm > self.settings.explosion_threshold
        if finite:
            self.skipped_in_a_row = 0
            self.explosions += exploded
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
        if self.settings.auto_reduce_lr and (exploded or not finite):
            self.reductions += 1
        return finite

    @property
    def learning_rate_scale(self) -> float:
        return float(self.settings.lr_reduction_factor**self.reductions)

    def metrics(self) -> dict[str, float]:
        return {"explosions": self.explosions, "skipped_steps": self.skipped, "lr_scale": self.learning_rate_scale}

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("explosions", "skipped", "skipped_in_a_row", "reductions")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class NonFiniteLossError(ShoalError):
    """The loss of a step is not finite. The step was not taken."""


class LossCheck:
    """Whether the losses of a step are finite in all processes. Holds: a step with a loss that is not finite is not taken.

    The loss of a GPU is read after its backward pass was started, so that the GPU has work to do meanwhile.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.enabled = False
        """Only where a loop ends a run for it: a worker drops such a gradient and goes on."""
        self._reads: list[Callable[[], float]] = []
        self._worst = 0.0
        self._sum: PendingSum | None = None

    def note(self, loss: Tensor) -> None:
        """The loss of a batch, before its backward pass."""
        if self.enabled:
            self._reads.append(read_later(loss.detach()))

    def begin(self) -> None:
        """All losses of a network were noted: begin to ask the other processes. On a GPU these are asked last, when they have computed."""
        if self.enabled and self.device.type != "cuda":
            self._ask()

    def _ask(self) -> None:
        losses = [read() for read in self._reads]
        self._reads.clear()
        self._worst = next((loss for loss in losses if not math.isfinite(loss)), 0.0)
        self._sum = self.world.begin_sum([float(not math.isfinite(self._worst))])

    def expect_finite(self) -> None:
        """Raises NonFiniteLossError in every process, before a step is taken."""
        if not self.enabled:
            return
        if self._sum is None:
            self._ask()
        assert self._sum is not None
        found, self._sum = self._sum.wait()[0], None
        if found:
            loss = "not finite in another process" if math.isfinite(self._worst) else str(self._worst)
            raise NonFiniteLossError(f"the loss is {loss}")


def read_later(value: Tensor) -> Callable[[], float]:
    """A number that is read without waiting for what the GPU is given to do after this call."""
    if not value.is_cuda:
        return lambda: float(value)
    host_copy = torch.empty((), dtype=value.dtype, pin_memory=True)
    host_copy.copy_(value, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> float:
        done.synchronize()
        return float(host_copy)

    return read
