"""The store and the server of a simulated coordinator.

The store checks and counts what is written and keeps none of it: a simulation of an hour writes more than fits into memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from shoal.protocol.messages import Frames, Message, Request
from shoal.transports import Traffic
from shoal.updates.state_packing import Checkpoint

Result = TypeVar("Result")
_MIXING, _WORD = 1_000_003, 0xFFFFFFFF


class CountingJournal:
    """A journal that counts records by kind and discards them."""

    bytes_since_snapshot, open = 0, True

    def __init__(self) -> None:
        self.records_since_snapshot, self._begun = 0, 0
        self.kinds: Counter[str] = Counter()

    def begin(self, pending: Iterable[tuple[dict[str, Any], Frames]] = ()) -> int:
        self.records_since_snapshot, self._begun = sum(1 for _ in pending), self._begun + 1
        return self._begun

    def append_all(self, records: Sequence[tuple[dict[str, Any], Frames]]) -> None:
        self.records_since_snapshot += len(records)
        for record, _ in records:
            self.kinds[record["kind"]] += 1

    def recover(self, snapshot: int) -> Iterator[tuple[dict[str, Any], Any]]:
        return iter(())

    def close(self) -> None: ...


class CheckedLedger:
    """A ledger that checks each line and discards it. Holds: versions count up by one, and no contribution is in two of them."""

    length = 0

    def __init__(self) -> None:
        self.applied: Counter[str] = Counter()
        """By worker: contributions that a version uses or lists as unused."""
        self.violations: list[str] = []
        self.digest = 0
        """Checksum of all lines: equal for equal simulations."""
        self._version = 0
        self._last: dict[str, int] = {}

    def append(self, line: dict[str, Any]) -> None:
        self.length += 1
        self.digest = self.digest * _MIXING + self.length & _WORD
        if "version" in line:
            self._version += 1
            if line["version"] != self._version:
                self.violations.append(f"version {line['version']} follows version {self._version - 1}")
        for worker, number, base, _, _, seat, _, position, *_ in [*line.get("from", ()), *line.get("unused", ())]:
            self.applied[worker] += 1
            if number <= self._last.get(worker, -1):
                self.violations.append(f"contribution {number} of {worker} comes after its contribution {self._last[worker]}, or twice")
            self._last[worker] = number
            self.digest = self.digest * _MIXING + 65_537 * number + 257 * base + 17 * seat + position & _WORD

    def cut(self, length: int) -> None: ...
    def close(self) -> None: ...


class NoSnapshots:
    """Snapshots that are taken, so that their CPU time counts, and discarded."""

    def copied(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> Callable[[], Any]:
        return lambda: None

    def all(self) -> list[str]:
        return [""]

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        return None


class CountingStore:
    """The store of a coordinator in virtual time."""

    transactional, receipt_key = False, b""

    def __init__(self) -> None:
        self.journal, self.ledger, self.snapshots = CountingJournal(), CheckedLedger(), NoSnapshots()

    def carry_out(self, work: Callable[[], Result]) -> Result:
        return work()

    def settle(self) -> list[str]:
        return []

    def forget(self) -> None: ...


class CallbackServer:
    """A server whose clients are callbacks that receive the answer."""

    address = ""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def poll(self, timeout_s: float) -> list[Request]:
        return []

    def reply(self, request: Any, message: Message) -> None:
        request(message)

    def wake(self) -> None: ...
    def close(self) -> None: ...
