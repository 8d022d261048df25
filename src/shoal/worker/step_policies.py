"""The worker's part of a strategy: the source of its data, what it sends and how often, and when it pulls new weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FeedPolicy:
    """Where a worker's data comes from: its own shard, in its own order, or leased units."""

    leased: bool = False
    """Whether the worker leases one unit of the data after the other; every sample is in one."""
    batches: int = 1
    """Batches in a unit."""
    lease_s: float = 300.0
    """Seconds that a worker with a unit may be silent before the unit is leased to another worker."""
    attempts: int = 3
    """Attempts at a unit before it is given up."""
    most_lag: int | None = 0
    """Versions that may be made while a worker has a unit before its result is too late; None: as many as the number of workers asks for
    (`staleness.bound_for`)."""
    given: bool = False
    """Whether the lease contains all that a unit needs, so that the worker reads no data."""


@dataclass(frozen=True)
class PullPolicy:
    """When a worker takes new weights, and how."""

    every: int = 1
    """Steps between pulls."""
    blend: float = 1.0
    """Share of the pulled weights in the worker's own; 1: they replace them."""
    look_ahead: bool = False
    """Whether a worker computes where the weights are expected to be when its contribution arrives."""
