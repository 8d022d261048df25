"""Events: everything that `Coordinator.handle` reacts to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal.protocol.messages import Frames, LeaseMessage, WorkerRequest


class RequestReceived(NamedTuple):
    """A worker sent a request."""

    caller: Any
    """The request to reply to; opaque to the coordinator."""
    asked: WorkerRequest
    frames: Frames = ()
    session: str = ""
    """An unguessable string: for a worker that joins, the nonce to sign and then its session."""
    guest: str = ""
    """Person on whose invitation the worker connected; empty: it has the run's own token."""
    address: str = ""
    """Network address of the worker; empty: the transport does not know it."""


class LeaseResult(NamedTuple):
    """The database that keeps the leases delivers the result of a unit."""

    asked: LeaseMessage
    frames: Frames = ()
    more: bool = False
    """Whether other results follow at once: no round closes before they are in it."""


class UnusableResult(NamedTuple):
    """The result of a unit in the database that keeps the leases cannot be read."""

    epoch: int
    start: int
    reason: str


class WorkerExited(NamedTuple):
    """The launcher saw this worker's process exit: no round waits for it until it joins again."""

    name: str


class ServingStarted(NamedTuple):
    """The coordinator begins to serve, for the first time or after a restart."""


class Interrupted(NamedTuple):
    """The run ends early. Open rounds stay open, for a run that is resumed later."""

    reason: str


class RunConcluded(NamedTuple):
    """The run is over: the ledger names the contributions of rounds that will not close."""


class Tick(NamedTuple):
    """Time has passed."""


class UpstreamState(NamedTuple):
    """State of a relay as a worker of the coordinator above."""

    name: str
    """The relay's name there."""
    version: int
    """The version there of the relay's weights."""
    step: float
    inner_steps: int
    """Inner steps that a worker takes; 0: none."""
    seq: int
    """Number of the relay's next contribution."""
    begun_at: int
    """Batches of the relay's seat that were learned from before this relay began."""
    task: Sequence[int] = ()
    """In runs with a scheduler: epoch, first batch and end of what the relay has to do next."""


class UpstreamAnswered(NamedTuple):
    """The coordinator above answered a relay's contribution with new weights."""

    upstream: UpstreamState
    status: str
    """Status of the contribution."""
    frames: Frames
    """The complete new weights, and the buffers."""
    done: bool
    """Whether the run is over."""


Event = (
    RequestReceived | LeaseResult | UnusableResult | WorkerExited | ServingStarted | Interrupted | RunConcluded | Tick | UpstreamAnswered
)
