"""Snapshots of a coordinator: what there is now is copied, and a thread writes the copy while the run goes on.

The new journal is there before the snapshot that it follows. Until that is whole, the snapshot before and both journals are what survives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from shoal.coordinator.effects import Frames
from shoal.coordinator.store import Store


class SnapshotWriter:
    """At most one is under way."""

    def __init__(self, store: Store, threads: bool = True) -> None:
        """`threads`: write beside the work; else at once."""
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots") if threads else None
        self._under_way: Future[Any] | None = None

    @property
    def under_way(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def write(self, pending: Iterable[tuple[dict[str, Any], Frames]], weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Begin a new journal with what belongs to open rounds, and a snapshot. Raises what befell the one before."""
        self.finish()
        held = list(pending)
        number = self.store.carry_out(lambda: self.store.journal.begin(held))
        self._under_way = self._submit(self.store.snapshots.copied(number, weights, state))

    def _submit(self, write: Callable[[], Any]) -> Future[Any]:
        if self._thread is not None:
            return self._thread.submit(write)
        done: Future[Any] = Future()
        done.set_result(write())
        return done

    def finish(self) -> None:
        """Wait until it is whole."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None
            self.store.forget()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
