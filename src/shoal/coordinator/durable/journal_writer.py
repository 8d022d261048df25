"""Thread that writes the journal while the coordinator handles the next contribution.

Holds: effects are carried out in order, and an effect after a record waits until the record is written. So no reply confirms anything that
a crash could undo.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from shoal.coordinator.effects import Effect, Persist

LEAST_THREAD_BYTES = 1 << 20
"""Records below this size are written at once: handing them to the thread takes longer."""
_MOST_AHEAD, _MOST_BYTES_AHEAD = 16, 256 << 20
"""Bounds on the records that wait to be written and on their bytes, as each holds its frames in memory. One may wait, however long."""


class JournalWriter:
    """Queue of effects that wait for their records. All methods are for one thread."""

    def __init__(self, append: Callable[[Sequence[Persist]], None], carry_out: Callable[[Effect], None], ready: Callable[[], None]) -> None:
        """`append` writes records, in either thread; `carry_out` does other effects; the writer calls `ready` after each record."""
        self._append, self._carry_out, self._ready = append, carry_out, ready
        self._queue: deque[Effect] = deque()
        """Effects that are not carried out yet; the first is a record that is being written."""
        self._ahead = self._bytes_ahead = 0
        self._to_write: queue.SimpleQueue[Persist | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, effects: list[Effect]) -> None:
        """Carry these effects out after all earlier ones."""
        small: list[Persist] = []
        """Records that are written together: mostly a contribution, and the round that closes with it."""
        for effect in effects:
            if isinstance(effect, Persist) and not (self._queue or _bytes_of(effect) >= LEAST_THREAD_BYTES):
                small.append(effect)
                continue
            if small:
                self._append(small)
                small = []
            if isinstance(effect, Persist):
                self._hand_over(effect)
            elif self._queue:
                self._queue.append(effect)
            else:
                self._carry_out(effect)
        if small:
            self._append(small)
        while self._ahead > _MOST_AHEAD or (self._ahead > 1 and self._bytes_ahead > _MOST_BYTES_AHEAD):
            self._next(self._written.get())
        self.resume()

    def resume(self) -> None:
        """Carry out the effects whose records are written by now. Raises what the journal raised."""
        while self._queue and not self._written.empty():
            self._next(self._written.get())

    def drain(self) -> None:
        """Wait until everything is written and carried out."""
        while self._queue:
            self._next(self._written.get())

    def close(self) -> None:
        """Write the records that wait, and end the thread; other waiting effects are dropped."""
        if self._thread is not None:
            self._to_write.put(None)
            self._thread.join()
            self._thread = None
        self._queue.clear()

    def _hand_over(self, record: Persist) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="journal-writer", daemon=True)
            self._thread.start()
        self._queue.append(record)
        self._ahead += 1
        self._bytes_ahead += _bytes_of(record)
        self._to_write.put(record)

    def _next(self, problem: BaseException | None) -> None:
        """Handle the outcome of writing the record at the head of the queue."""
        if problem is not None:
            self._queue.clear()
            raise problem
        self._bytes_ahead -= _bytes_of(self._queue.popleft())
        self._ahead -= 1
        while self._queue and not isinstance(self._queue[0], Persist):
            self._carry_out(self._queue.popleft())

    def _write(self) -> None:
        while (record := self._to_write.get()) is not None:
            problem: BaseException | None = None
            try:
                self._append([record])
            except BaseException as error:
                problem = error
            self._written.put(problem)
            self._ready()
            if problem is not None:
                return


def _bytes_of(effect: Effect) -> int:
    return sum(map(len, effect.frames)) if isinstance(effect, Persist) else 0
