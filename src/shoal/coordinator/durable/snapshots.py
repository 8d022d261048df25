"""Snapshots of a coordinator: its state is copied, and a thread writes the copy while the run continues.

The new journal begins before the snapshot that it follows. Until that is complete, the snapshot before and both journals are what survives.
So a failed snapshot costs only a longer journal: it is reported, and tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from shoal.coordinator.driver_interfaces import CoordinatorStore
from shoal.errors import ShoalError
from shoal.protocol.messages import Frames

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0


class SnapshotWriter:
    """Writes snapshots, one at a time."""

    def __init__(self, store: CoordinatorStore, say: Callable[[str], None], threads: bool = True) -> None:
        """`say` reports to the user; `threads`: write in a thread, otherwise at once."""
        self.store, self.say = store, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots") if threads else None
        self._under_way: Future[Any] | None = None
        self._failed = False
        self._pause_s = _FIRST_PAUSE_S
        self._again_at: float | None = None

    def due(self, long: bool, now: float) -> bool:
        """Whether to write a snapshot now: the journal is long, or the last snapshot failed some time ago."""
        if self._under_way is not None and not self._under_way.done():
            return False
        self.finish()
        if self._failed and self._again_at is None:
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return long if self._again_at is None else now >= self._again_at

    def write(self, pending: Iterable[tuple[dict[str, Any], Frames]], weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Begin a new journal with the records of open rounds, and a snapshot. Raises ShoalError where nothing would survive a crash."""
        self.finish()
        self._failed, self._again_at = False, None
        held = list(pending)
        try:
            number = self.store.carry_out(lambda: self.store.journal.begin(held))
        except (ShoalError, OSError) as error:
            return self._fail(error)
        self._under_way = self._submit(self.store.snapshots.copied(number, weights, state))
        return None

    def _submit(self, write: Callable[[], Any]) -> Future[Any]:
        if self._thread is not None:
            return self._thread.submit(write)
        done: Future[Any] = Future()
        try:
            done.set_result(write())
        except ShoalError as error:
            done.set_exception(error)
        return done

    def finish(self) -> None:
        """Wait until the snapshot is complete. Raises ShoalError where it failed and nothing would survive a crash."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        try:
            under_way.result()
            self.store.forget()
            self._pause_s = _FIRST_PAUSE_S
        except (ShoalError, OSError) as error:
            self._fail(error)

    def _fail(self, error: ShoalError | OSError) -> None:
        """Report the error and try again later. Raises where there is no snapshot at all, or no journal that takes records."""
        if not self.store.journal.open or not self._has_one():
            raise error if isinstance(error, ShoalError) else ShoalError(f"cannot write a snapshot: {error}")
        self._failed = True
        self.say(f"warning: {error}; nothing is lost, the snapshot before it and the journal have everything; it is tried again")

    def _has_one(self) -> bool:
        try:
            return bool(self.store.snapshots.all())
        except OSError:  # too many open files: there is one, since the run began with one
            return True

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
