"""The worker's share of a strategy: where its data comes from, what it sends and how often, and when it takes new weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardFeedPolicy:
    """A worker goes through a share of the data that is its own, in an order of its own."""

    leased: bool = False
    """Whether it is given one unit of the data after the other instead."""
    batches: int = 1
    """Batches in a unit."""
    lease_s: float = 300.0
    """How long a worker may be silent with a unit before others may have it."""
    attempts: int = 3
    """How often a unit is tried before it is given up."""
    most_lag: int = 0
    """Versions that may be made while a worker has a unit, before its result is too late."""
    given: bool = False
    """Whether all that a unit takes comes with its lease, so that a worker reads no data."""


@dataclass(frozen=True)
class LeasedUnitPolicy(ShardFeedPolicy):
    """A worker leases one unit of the data after the other; every sample is in one."""

    leased: bool = True


@dataclass(frozen=True)
class PullPolicy:
    """When a worker takes new weights, and how."""

    every: int = 1
    """Steps between pulls."""
    blend: float = 1.0
    """Share of the pulled weights in the worker's own; 1: they replace them."""
    look_ahead: bool = False
    """Whether a worker computes where the weights are expected to be when its contribution arrives."""
