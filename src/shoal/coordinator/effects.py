"""What the coordinator wants done. It does nothing itself: the driver carries these out, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Frames = Sequence[bytes | memoryview]


class Reply(NamedTuple):
    """Answer a caller."""

    caller: Any
    header: dict[str, Any]
    frames: Frames = ()


class Persist(NamedTuple):
    """Keep a record, so that it survives, before anything that follows is done."""

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


class Issue(NamedTuple):
    """Offer these units, by number, for this version, where a database keeps the leases. Units of an older version are cancelled."""

    version: int
    units: Sequence[int]


class Dismiss(NamedTuple):
    """Keep a worker out, or let it in again, where a database lets workers in."""

    worker: str
    out: bool


class Note(NamedTuple):
    """Say this to people."""

    text: str


class StopRun(NamedTuple):
    """The run cannot go on."""

    reason: str


Effect = Reply | Persist | LedgerEntry | Published | Issue | Dismiss | Note | StopRun
