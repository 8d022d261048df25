"""Between workers: how updates become new weights. One small file each; `of` finds the one that a run asks for."""

from __future__ import annotations

from shoal.config import Run
from shoal.strategies.policies import Extent, Length, Policies
from shoal.strategies.relay_rules import no_relay

__all__ = ["Extent", "Length", "Policies", "no_relay", "of"]


def of(run: Run, expected: int) -> Policies:
    """The policies of the run's strategy, with so many workers expected."""
    policies: Policies = run.strategy.builder()(run, expected)
    return policies
