"""How late a contribution may be, and what it then counts."""

from __future__ import annotations

import pytest

from shoal.updates.staleness import adaptive_bound, weight


def test_a_late_contribution_counts_one_over_one_plus_its_lag() -> None:
    assert [weight(lag) for lag in (0, 1, 4)] == [1.0, 0.5, 0.2]


@pytest.mark.parametrize(("speed", "bound"), [(1.0, 10), (2.0, 5), (0.5, 20), (0.1, 30), (5.0, 4), (0.0, 30)])
def test_slow_workers_may_be_later_within_bounds(speed: float, bound: float) -> None:
    assert adaptive_bound(10, speed, min_staleness=4, multiplier=3) == bound


def test_the_upper_end_wins_where_the_bounds_cross() -> None:
    """clamp(x, low, high) as documented: nothing passes max × multiplier."""
    assert adaptive_bound(10, 1.0, min_staleness=8, multiplier=0.5) == 5
