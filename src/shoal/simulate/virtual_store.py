"""A store that keeps nothing but counts, and a server whose answers are functions: what a coordinator's driver needs in virtual time.

What was written is judged as it comes: a simulation of an hour writes more than memory holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from shoal.coordinator.driver_interfaces import SavedState
from shoal.coordinator.effects import Frames
from shoal.protocol.messages import Message, Request
from shoal.transports import Traffic

Result = TypeVar("Result")
_MIXING, _WORD = 1_000_003, 0xFFFFFFFF


class CountingJournal:
    """Records are counted by their kinds, and forgotten."""

    bytes_since_snapshot, open = 0, True

    def __init__(self) -> None:
        self.records_since_snapshot, self._begun = 0, 0
        self.kinds: Counter[str] = Counter()

    def begin(self, pending: Iterable[tuple[dict[str, Any], Frames]] = ()) -> int:
        self.records_since_snapshot, self._begun = sum(1 for _ in pending), self._begun + 1
        return self._begun

    def append(self, record: dict[str, Any], frames: Frames = ()) -> None:
        self.records_since_snapshot += 1
        self.kinds[record["kind"]] += 1

    def recover(self, snapshot: int) -> Iterator[tuple[dict[str, Any], Any]]:
        return iter(())

    def close(self) -> None: ...


class CheckedLedger:
    """Every line is looked at once: versions count up by one, and no contribution is in two of them."""

    length = 0

    def __init__(self) -> None:
        self.applied: Counter[str] = Counter()
        """Contributions of each worker that went into a version, or that were named as unused."""
        self.violations: list[str] = []
        self.digest = 0
        """Of all lines: the same simulation gives the same."""
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
    """Snapshots are taken, so that they take their time, and forgotten."""

    def copied(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> Callable[[], Any]:
        return lambda: None

    def all(self) -> list[str]:
        return [""]

    def newest(self, warn: Callable[[str], None]) -> SavedState | None:
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
    """A server whose callers are functions that take the answer."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def poll(self, timeout_s: float) -> list[Request]:
        return []

    def reply(self, request: Any, message: Message) -> None:
        request(message)

    def wake(self) -> None: ...
    def close(self) -> None: ...
