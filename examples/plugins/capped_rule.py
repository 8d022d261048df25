"""A rule: the mean of contributions, none of which counts as longer than the middle one."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from shoal.plugins import Aggregation, Contributions, PositiveFloat, builds


class CappedMean(Aggregation):
    """The mean, after every contribution was cut to the length of the middle one."""

    kind: Literal["capped-mean"] = "capped-mean"
    slack: PositiveFloat = 1.0
    """How much longer than the middle one a contribution may be."""


@builds(CappedMean)
def capped_mean(rule: CappedMean, contributions: Contributions) -> Tensor:
    lengths_N = contributions.rows.norm(dim=1)
    most = rule.slack * lengths_N.median()
    return (contributions.rows * (most / lengths_N.clamp(min=1e-12)).clamp(max=1)[:, None]).mean(0)
