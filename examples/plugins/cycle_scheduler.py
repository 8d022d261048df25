"""A scheduler: the learning rate rises to a peak and falls to almost nothing (Smith, 2018)."""

from __future__ import annotations

from typing import Literal

import torch

from shoal.plugins import PositiveFloat, PositiveShare, RateScheduler, builds


class OneCycle(RateScheduler):
    """The policy of one cycle."""

    kind: Literal["one-cycle"] = "one-cycle"
    peak: PositiveFloat = 1e-3
    """The highest learning rate."""
    rise: PositiveShare = 0.3
    """Share of the run until then."""


@builds(OneCycle)
def one_cycle(settings: OneCycle, optimizer: torch.optim.Optimizer, total_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.peak, total_steps=total_steps + 1, pct_start=settings.rise, cycle_momentum=False
    )
