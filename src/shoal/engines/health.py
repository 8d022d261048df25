"""Gradient health: a clip value on a schedule, detection of exploding gradients, and of steps that are not finite."""

from __future__ import annotations

import math
from typing import Any

from shoal.config.schema.training import GradientHealth

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
