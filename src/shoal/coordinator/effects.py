"""Effects: what `Coordinator.handle` wants done. The driver carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.protocol.messages import Frames


class Reply(NamedTuple):
    """Reply to a caller."""

    caller: Any
    header: dict[str, Any]
    frames: Frames = ()


class Persist(NamedTuple):
    """Write a record to the journal before the effects that follow are carried out."""

    record: dict[str, Any]
    frames: Frames = ()


class LedgerEntry(NamedTuple):
    """Append a line to the ledger."""

    line: dict[str, Any]


class Published(NamedTuple):
    """There is a new version."""

    version: int
    metrics: Mapping[str, float]
    weight: float
    samples: int
    batches: int


class Measured(NamedTuple):
    """Keep what the scores of a round were measured with, for an audit."""

    version: int
    """Version whose weights the contributions were measured on."""
    weights: Tensor
    buffers: Tensor
    contributions: Sequence[tuple[dict[str, Any], Frames]]
    """The record and the frames of each contribution."""


class Issue(NamedTuple):
    """Offer these units, by number, for this version in the database that keeps the leases. It cancels what is pending of older versions,
    and leases that lag more than `most_lag` versions."""

    version: int
    units: Sequence[int]
    most_lag: int


class Dismiss(NamedTuple):
    """Keep a worker out, or let it in again, in the database that keeps the leases."""

    worker: str
    out: bool


class Note(NamedTuple):
    """Show a text to the user."""

    text: str


class StopRun(NamedTuple):
    """End the run: it cannot continue."""

    reason: str


Effect = Reply | Persist | LedgerEntry | Published | Measured | Issue | Dismiss | Note | StopRun
