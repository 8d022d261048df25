"""Work units: workers lease units of the data, and a number of results makes an update.

Holds: every unit of an epoch is learned from once, whichever worker does it and whichever dies. A unit that a worker computes when its
version closes stays leased: its result counts 1/(1+lag) in the round in which it arrives. Beyond `max_lag` it is dropped, and its unit is
leased again. A worker that has delivered waits for a version that is near.
"""

from __future__ import annotations

from shoal.config import Run
from shoal.config.schema.strategy import WorkUnits
from shoal.coordinator import Discounted, UnitQuorum
from shoal.strategies.policy_set import Policies
from shoal.strategies.run_length import in_units
from shoal.worker.producers import UnitGradientContribution
from shoal.worker.step_policies import FeedPolicy


def policies(run: Run, expected: int) -> Policies:
    settings = run.strategy
    assert isinstance(settings, WorkUnits)
    rounds = UnitQuorum(settings.units_per_update)
    return Policies(
        rounds=rounds,
        length=in_units(run, rounds, settings.batches_per_unit),
        feed=FeedPolicy(
            leased=True,
            batches=settings.batches_per_unit,
            lease_s=settings.lease_timeout_s,
            attempts=max(1, settings.max_retries),
            most_lag=settings.max_lag,
        ),
        admission=Discounted(),
        contribution=UnitGradientContribution(),
    )
