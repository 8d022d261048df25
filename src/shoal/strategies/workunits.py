"""Work units: workers lease pieces of the data, and a number of results makes an update.

Holds: every piece of an epoch is learned from once, whoever does it and whoever dies; a result for weights that have moved on is dropped
where it is handed in, and its piece is given out again.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import WorkUnits
from shoal.coordinator import Policy, Quorum


def policy(run: Run, expected: int) -> Policy:
    settings = run.strategy
    assert isinstance(settings, WorkUnits)
    return Policy(
        rounds=Quorum(settings.units_per_update, settings.lease_timeout_s, settings.max_retries),
        admission=lambda lag, speed: 1.0,
    )
