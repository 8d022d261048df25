"""What a strategy is made of: a few small choices, read by the coordinator and by the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Barrier:
    """A round closes when every active worker has sent, or some time after the first one did."""

    deadline_s: float
    window: int = 1
    """Rounds that may be open at once; 1 is a strict barrier."""
    quorum: int | None = None
    """Contributions with which it may close earlier; None: all are waited for."""
    grace_s: float = 0.0
    """How long it stays open with its quorum."""
    late_count: bool = False
    """Whether a contribution whose round has closed goes into the one that is open."""


@dataclass(frozen=True)
class Every:
    """A round closes when so many different workers have sent; the latest contribution of each counts."""

    contributions: int = 1


@dataclass(frozen=True)
class Quorum:
    """A round closes when so many units of the data have come in, or no unit is left."""

    contributions: int
    lease_s: float
    """How long a worker may take for a unit before others may have it."""
    max_retries: int


@dataclass(frozen=True)
class Inner:
    """A worker takes many steps alone before it sends how far they led it."""

    steps: int
    """Steps between two contributions."""
    averages: bool = False
    """Whether the new weights are the mean of the workers' own: then those are sent, not how far they moved."""
    balanced: bool = False
    """Whether slower workers take fewer steps."""
    fragments: int = 1
    """Parts of the weights that take turns."""
    overlap: int = 0
    """Steps that a worker goes on while its contribution is on its way."""

    def passes(self, version: int, every: int) -> bool:
        """Whether this version is the first at or after one of every so many steps of a worker."""
        return version * self.steps // every > (version - 1) * self.steps // every


@dataclass(frozen=True)
class Policy:
    """How updates become new weights."""

    rounds: Barrier | Every | Quorum
    admission: Callable[[int, float], float]
    """(lag in versions, speed against the median) → the share a contribution counts with; 0: it is too late."""
    pull_every: int = 1
    """Steps of a worker between pulls of the weights."""
    blend: float = 1.0
    """Share of the pulled weights in the worker's own; 1: they replace them."""
    worker_steps: bool = False
    """Whether a worker also steps its own weights, between pulls, with its own optimizer."""
    look_ahead: bool = False
    """Whether a worker computes where the weights are expected to be when its contribution arrives."""
    most_lag: Callable[[float], float] = lambda speed: float("inf")
    """speed → versions that a worker may lag. It tells workers whether they may compute while they send."""
    inner: Inner | None = None
    """What workers do between two contributions; None: each is one gradient."""

    @property
    def window(self) -> int:
        """Rounds that may be open at once; 0: there are no rounds to wait for."""
        return self.rounds.window if isinstance(self.rounds, Barrier) else 0
