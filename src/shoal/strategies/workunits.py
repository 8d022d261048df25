"""Work units: workers lease pieces of the data, and a number of results makes an update.

Holds: every piece of an epoch is learned from once, whichever worker does it and whichever dies; a result for weights that have moved on is
dropped where it is handed in, and its piece is given out again.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import WorkUnits
from shoal.coordinator import UnitQuorum
from shoal.strategies.policies import Policies
from shoal.strategies.run_length import in_units
from shoal.worker.policies import LeasedUnitPolicy
from shoal.worker.producers import UnitGradientContribution


def policies(run: Run, expected: int) -> Policies:
    settings = run.strategy
    assert isinstance(settings, WorkUnits)
    rounds = UnitQuorum(settings.units_per_update)
    return Policies(
        rounds=rounds,
        length=in_units(run, rounds, settings.batches_per_unit),
        feed=LeasedUnitPolicy(batches=settings.batches_per_unit, lease_s=settings.lease_timeout_s, attempts=max(1, settings.max_retries)),
        contribution=UnitGradientContribution(),
    )
