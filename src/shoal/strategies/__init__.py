"""Between workers: how updates become new weights. One small file each; `of` finds the one that a run asks for."""

from __future__ import annotations

from collections.abc import Callable

from shoal.config import Run
from shoal.strategies import asynchronous, diloco, edp, syncps, workunits
from shoal.strategies.strategy import Extent, Length, Strategy

__all__ = ["STRATEGIES", "Extent", "Length", "Strategy", "covers_all", "of"]

STRATEGIES: dict[str, Callable[[Run, int], Strategy]] = {
    "workunits": workunits.strategy,
    "syncps": syncps.strategy,
    "edp": edp.strategy,
    "async": asynchronous.strategy,
    "diloco": diloco.strategy,
}


def of(run: Run, expected: int) -> Strategy:
    """The run's strategy, with so many workers expected."""
    return STRATEGIES[run.strategy.kind](run, expected)


def covers_all(run: Run) -> bool:
    """Whether every sample of an epoch is learned from, so that a last batch that is smaller is not left out."""
    return run.strategy.kind in STRATEGIES and of(run, 1).feed.leased
