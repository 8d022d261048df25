"""What the driver asks of the world: a place where things survive, a door that workers come through, and somebody who watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol, TypeVar

from torch import Tensor

from shoal.coordinator.effects import Frames, Published
from shoal.protocol.messages import Message, Request

Result = TypeVar("Result")


class SavedState(Protocol):
    """A checkpoint or a snapshot, wherever it is."""

    @property
    def path(self) -> PurePath: ...
    @property
    def step(self) -> int: ...
    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def state(self) -> dict[str, Any]: ...


class Journal(Protocol):
    """Records since the last snapshot."""

    records_since_snapshot: int

    @property
    def bytes_since_snapshot(self) -> int: ...
    @property
    def open(self) -> bool:
        """Whether records can be appended, or a new journal must begin first."""
        ...

    def begin(self, pending: Iterable[tuple[dict[str, Any], Frames]] = ()) -> int: ...
    def append(self, record: dict[str, Any], frames: Frames = ()) -> None: ...
    def recover(self, snapshot: int) -> Iterator[tuple[dict[str, Any], Any]]: ...
    def close(self) -> None: ...


class Ledger(Protocol):
    """What entered which version."""

    @property
    def length(self) -> int: ...
    def append(self, line: dict[str, Any]) -> None: ...
    def cut(self, length: int) -> None:
        """Go back to the length that a snapshot knows of: the records since then are taken again."""
        ...

    def close(self) -> None: ...


class Snapshots(Protocol):
    """Everything, now and then."""

    def copied(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> Callable[[], Any]: ...
    def all(self) -> Sequence[Any]: ...
    def newest(self, warn: Callable[[str], None]) -> SavedState | None: ...


class CoordinatorStore(Protocol):
    """Where a coordinator keeps what must survive it."""

    @property
    def journal(self) -> Journal: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def snapshots(self) -> Snapshots: ...
    @property
    def receipt_key(self) -> bytes:
        """What the coordinator seals receipts with; empty where it cannot keep a key."""
        ...

    @property
    def transactional(self) -> bool:
        """Whether what belongs together is one transaction. Files are written in order instead, and may be written beside the work."""
        ...

    def carry_out(self, work: Callable[[], Result]) -> Result:
        """Do it: whole or not at all where the store can do that, and again if the store was gone for a moment."""
        ...

    def settle(self) -> list[str]:
        """Every record since the snapshot was taken again. Return what people should know of what was read. Raises ShoalError where what is
        kept does not fit together."""
        ...

    def forget(self) -> None:
        """A snapshot is whole: journals that none needs any more can go."""
        ...


class TrafficCounts(Protocol):
    """What went through the door, and what was turned away."""

    received_bytes: int
    sent_bytes: int
    refused: dict[str, int]

    def refuse(self, reason: str) -> None: ...


class RequestServer(Protocol):
    """The door that workers come through."""

    @property
    def traffic(self) -> TrafficCounts: ...
    def poll(self, timeout_s: float) -> list[Request]:
        """Requests that wait, as soon as there are some; none after the timeout, or when woken."""
        ...

    def reply(self, request: Request, message: Message) -> None: ...
    def wake(self) -> None:
        """Make a `poll` in progress return early; from any thread."""
        ...

    def close(self) -> None: ...


class LeaseDatabase(RequestServer, Protocol):
    """A server that also keeps leases of units. What it passes on of them stays there until it is consumed."""

    def is_from_leases(self, request: Request) -> bool: ...
    def consume(self, request: Request) -> None: ...
    def iteration(self) -> int | None:
        """The version that units are on offer for, if any ever were."""
        ...

    def has_open_units(self) -> bool:
        """Whether there is a unit that a worker does, or may do."""
        ...

    def issue(
        self, iteration: int, units: Sequence[tuple[int, int, int]], lease_timeout_s: float, max_retries: int, quorum: int | None
    ) -> None: ...
    def publish(self, version: int, kind: str, header: dict[str, Any], frames: Frames) -> None: ...
    def notes(self) -> list[str]:
        """What people should know of those who lease units; each is told once."""
        ...

    def workers(self) -> list[dict[str, Any]]: ...
    def keep_out(self, worker: str, out: bool) -> None:
        """Lend no more units to a worker of this name, or do so again."""
        ...


class RunObserver(Protocol):
    """Somebody who records what happens."""

    def published(self, version: Published, replaying: bool) -> None:
        """There is a new version; `replaying`: it was there before a crash, too."""
        ...

    def say(self, text: str) -> None: ...
