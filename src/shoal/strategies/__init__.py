"""Between workers: how updates become new weights. One small file each; `policies_for` finds the one that a run asks for."""

from __future__ import annotations

from shoal.config import Run
from shoal.strategies.policies import DataExtent, Policies, RunLength
from shoal.strategies.relay_rules import no_relay

__all__ = ["DataExtent", "Policies", "RunLength", "no_relay", "policies_for"]


def policies_for(run: Run, expected: int) -> Policies:
    """The policies of the run's strategy, with so many workers expected."""
    policies: Policies = run.strategy.builder()(run, expected)
    return policies
