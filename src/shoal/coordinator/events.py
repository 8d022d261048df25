"""Events: everything that `Coordinator.handle` reacts to."""

from __future__ import annotations

from typing import Any, NamedTuple

from shoal.coordinator.effects import Frames
from shoal.protocol.messages import Asked, FromLeases


class RequestReceived(NamedTuple):
    """A worker asks something."""

    caller: Any
    """Whom to answer; only the transport knows what is in it."""
    asked: Asked
    frames: Frames = ()
    session: str = ""
    """A word that nobody can guess: for a worker that joins, what it has to sign, and then its session."""
    guest: str = ""
    """Whose invitation let the worker in; empty: the run's own token."""
    address: str = ""
    """Where the worker is, as far as the transport can tell."""


class LeaseResult(NamedTuple):
    """The database that keeps the leases passes on what came of a unit."""

    asked: FromLeases
    frames: Frames = ()
    more: bool = False
    """Whether other results follow at once: then no round closes before they are in it."""


class UnusableResult(NamedTuple):
    """What was handed in for a unit, at the database that keeps the leases, cannot be read."""

    epoch: int
    start: int
    reason: str


class WorkerExited(NamedTuple):
    """The launcher saw this worker's process exit. No round waits for the worker until it comes back."""

    name: str


class ServingStarted(NamedTuple):
    """The coordinator begins to serve, for the first time or after a break."""


class Interrupted(NamedTuple):
    """The run is to end before its time. Open rounds stay open, for a run that goes on later."""

    reason: str


class RunConcluded(NamedTuple):
    """The run is over: contributions in rounds that will not close are written off, by name."""


class Tick(NamedTuple):
    """Time has passed."""


class UpstreamState(NamedTuple):
    """What a relay was told by the coordinator that it is a worker of."""

    name: str
    """Its name there."""
    version: int
    """The version there that its weights are."""
    step: float
    inner_steps: int
    """Steps that a worker takes alone; 0: it takes none."""
    seq: int
    """The number of the relay's next contribution."""
    begun_at: int
    """Batches of the relay's seat that were learned from before this relay began."""


class UpstreamAnswered(NamedTuple):
    """A relay was sent new weights, in answer to what it passed on."""

    upstream: UpstreamState
    status: str
    """What became of its contribution."""
    frames: Frames
    """The new weights, whole, and the statistics beside them."""
    done: bool
    """Whether the run is over."""


Event = (
    RequestReceived | LeaseResult | UnusableResult | WorkerExited | ServingStarted | Interrupted | RunConcluded | Tick | UpstreamAnswered
)
