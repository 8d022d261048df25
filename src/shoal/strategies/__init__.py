"""Strategies: how workers' updates become new weights. Each strategy is one small file; `policies_for` returns the policies of the run's
strategy."""

from __future__ import annotations

from shoal.config import Run
from shoal.strategies.policy_set import DataExtent, Policies, RunLength
from shoal.strategies.relay_rules import no_relay

__all__ = ["DataExtent", "Policies", "RunLength", "no_relay", "policies_for"]


def policies_for(run: Run, expected: int) -> Policies:
    """The policies of the run's strategy, for a run that expects `expected` workers."""
    return run.strategy.builder()(run, expected)
