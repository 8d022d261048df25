"""Snapshots of a coordinator in files: what there is now is copied, and a thread writes the copy while the run goes on.

The new journal is there before the snapshot that it follows. Until that is whole, the snapshot before and both journals are what survives.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from shoal.coordinator.effects import Frames
from shoal.strategies.keeping import Files


class Photographs:
    """At most one is under way."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._under_way: Future[Any] | None = None

    @property
    def under_way(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def take(self, pending: Iterable[tuple[dict[str, Any], Frames]], weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Begin a new journal with what belongs to open rounds, and a snapshot. Raises what befell the one before."""
        self.finish()
        number = self.files.journal.begin(pending)
        self._under_way = self._thread.submit(self.files.snapshots.copied(number, weights, state))

    def finish(self) -> None:
        """Until it is whole; the journals that no snapshot needs any more can then be written over."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None
            self.files.journal.forget_before(self.files.oldest_snapshot())

    def close(self) -> None:
        self._thread.shutdown()
