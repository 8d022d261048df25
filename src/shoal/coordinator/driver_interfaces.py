"""Interfaces of the driver's collaborators: store and lease database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from shoal.protocol.messages import Frames, Request
from shoal.protocol.server import Server
from shoal.updates.state_packing import Checkpoint

Result = TypeVar("Result")


class Journal(Protocol):
    """Records since the last snapshot."""

    records_since_snapshot: int

    @property
    def bytes_since_snapshot(self) -> int: ...
    @property
    def open(self) -> bool:
        """Whether records can be appended; otherwise a new journal must begin first."""

    def begin(self, pending: Iterable[tuple[dict[str, Any], Frames]] = ()) -> int: ...
    def append_all(self, records: Sequence[tuple[dict[str, Any], Frames]]) -> None:
        """Append records in order."""

    def recover(self, snapshot: int) -> Iterator[tuple[dict[str, Any], Any]]: ...
    def close(self) -> None: ...


class Ledger(Protocol):
    """Which contributions entered which version."""

    @property
    def length(self) -> int: ...
    def append(self, line: dict[str, Any]) -> None: ...
    def cut(self, length: int) -> None:
        """Go back to the length at a snapshot; the records since then are replayed."""

    def close(self) -> None: ...


class Snapshots(Protocol):
    """Snapshots of learner and coordinator."""

    def copied(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> Callable[[], Any]: ...
    def all(self) -> Sequence[Any]: ...
    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None: ...


class CoordinatorStore(Protocol):
    """Durable storage of a coordinator."""

    @property
    def journal(self) -> Journal: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def snapshots(self) -> Snapshots: ...
    @property
    def receipt_key(self) -> bytes:
        """Key of the receipts' seal; empty where the store cannot keep one."""

    @property
    def transactional(self) -> bool:
        """Whether the effects of an event are one transaction. Files are written in order instead, possibly in a thread."""

    def carry_out(self, work: Callable[[], Result]) -> Result:
        """Do the work as one transaction where the store has them, and again if the connection was lost."""

    def settle(self) -> list[str]:
        """End the replay of records. Return warnings for the user. Raises ShoalError where ledger and journal do not fit together."""

    def forget(self) -> None:
        """Drop old journals, now that a snapshot is complete."""


class LeaseDatabase(Server, Protocol):
    """A server in a database that also keeps the leases of units. A result stays in the database until it is consumed."""

    def is_from_leases(self, request: Request) -> bool: ...
    def consume(self, request: Request) -> None: ...
    def iteration(self) -> int | None:
        """The version that units are on offer for; None: none was ever offered."""

    def has_open_units(self) -> bool:
        """Whether there is a unit that is leased or can be."""

    def issue(
        self,
        iteration: int,
        units: Sequence[tuple[int, int, int]],
        lease_timeout_s: float,
        max_retries: int,
        quorum: int | None,
        max_lag: int,
    ) -> None: ...
    def publish(self, version: int, kind: str, header: dict[str, Any], frames: Frames) -> None: ...
    def notes(self) -> list[str]:
        """New notes for the user about workers that lease units."""

    def workers_here(self) -> int:
        """Number of workers that are here."""

    def workers(self) -> list[dict[str, Any]]: ...
    def set_end(self, status: str | None) -> None:
        """Report to all workers how the run has ended or was stopped; None: it goes on."""

    def keep_out(self, worker: str, out: bool) -> None:
        """Lease no more units to a worker of this name, or do so again."""
