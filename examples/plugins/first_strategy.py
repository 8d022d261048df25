"""A strategy: the first few gradients make an update, from any worker and however late."""

from __future__ import annotations

from typing import Literal

from shoal.plugins import Every, Policies, PositiveInt, Run, Strategy, builds, in_updates


class FirstComers(Strategy):
    """A number of contributions makes an update; none is too late."""

    kind: Literal["first-comers"] = "first-comers"
    update_from = "strategy.contributions"
    contributions: PositiveInt = 2
    """Workers whose contributions make an update."""


@builds(FirstComers)
def policies(run: Run, expected: int) -> Policies:
    assert isinstance(run.strategy, FirstComers)
    rounds = Every(min(run.strategy.contributions, expected))
    return Policies(rounds=rounds, length=in_updates(run, rounds))
