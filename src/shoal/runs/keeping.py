"""Where a coordinator keeps what must survive it: in files of its run, or in a database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from shoal.coordinator.effects import Frames
from shoal.coordinator.journal import Journal, Ledger
from shoal.runs.checkpoint import Checkpoints, Saved
from shoal.transports import Request, Server

Result = TypeVar("Result")


class JournalLike(Protocol):
    """Records since the last snapshot."""

    bytes_since_snapshot: int
    records_since_snapshot: int

    def begin(self, pending: Iterable[tuple[dict[str, Any], Frames]] = ()) -> int: ...
    def append(self, record: dict[str, Any], frames: Frames = ()) -> None: ...
    def recover(self, snapshot: int) -> Iterator[tuple[dict[str, Any], Any]]: ...
    def close(self) -> None: ...


class LedgerLike(Protocol):
    """What entered which version."""

    @property
    def length(self) -> int: ...
    def append(self, line: dict[str, Any]) -> None: ...
    def cut(self, length: int) -> None: ...
    def close(self) -> None: ...


class SnapshotsLike(Protocol):
    """Everything, now and then."""

    def copied(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> Callable[[], Any]: ...
    def all(self) -> Sequence[Any]: ...
    def newest(self, warn: Callable[[str], None]) -> Saved | None: ...


class Store(Protocol):
    """All of it."""

    @property
    def journal(self) -> JournalLike: ...
    @property
    def ledger(self) -> LedgerLike: ...
    @property
    def snapshots(self) -> SnapshotsLike: ...
    def carry_out(self, work: Callable[[], Result]) -> Result:
        """Do it, where the store can do that: whole or not at all, and again if the store was gone for a moment."""
        ...

    def forget(self) -> None:
        """A snapshot is whole: journals that none needs any more can go."""
        ...


class Files:
    """A store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.journal, self.ledger = Journal(folder), Ledger(folder)
        self.snapshots = Checkpoints(folder / "snapshots", 2)

    def carry_out(self, work: Callable[[], Result]) -> Result:
        return work()

    def forget(self) -> None:
        self.journal.forget_before(int(self.snapshots.all()[0].name.partition("-")[2]))


class Board(Server, Protocol):
    """A server that also keeps leases of units. What it passes on of them stays there until it is consumed."""

    def is_from_leases(self, request: Request) -> bool: ...
    def consume(self, request: Request) -> None: ...
    def iteration(self) -> int | None:
        """What units are on offer for, if any ever were."""
        ...

    def has_open_units(self) -> bool:
        """Whether there is a unit that somebody does, or may do."""
        ...

    def issue(
        self, iteration: int, units: Sequence[tuple[int, int, int]], lease_timeout_s: float, max_retries: int, quorum: int | None
    ) -> None: ...
    def publish(self, version: int, kind: str, header: Mapping[str, Any], frames: Frames) -> None: ...
    def workers(self) -> list[dict[str, Any]]: ...
