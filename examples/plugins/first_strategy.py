"""A strategy: the first few gradients make an update, whoever they are from, however late they are."""

from __future__ import annotations

from typing import Literal

from shoal.coordinator import Every, Policy
from shoal.plugins import PositiveInt, Run, Strategy, builds


class FirstComers(Strategy):
    """A number of contributions makes an update; none is too late."""

    kind: Literal["first-comers"] = "first-comers"
    update_from = "strategy.contributions"
    contributions: PositiveInt = 2
    """Workers whose contributions make an update."""


@builds(FirstComers)
def policy(run: Run, expected: int) -> Policy:
    assert isinstance(run.strategy, FirstComers)
    return Policy(rounds=Every(min(run.strategy.contributions, expected)), admission=lambda lag, speed: 1.0)
