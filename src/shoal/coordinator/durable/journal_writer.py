"""A thread that writes the journal while the coordinator goes on with the next contribution.

What follows a record waits until it is written: the effects of all events stand in one line, and leave it in order. So an answer still
tells of nothing that a crash could undo.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from shoal.coordinator.effects import Effect, Frames, Persist

WORTH_BYTES = 1 << 20
"""A smaller record is written faster than it is handed over."""
_MOST_AHEAD = 16
"""Records that may wait to be written: each holds its frames in memory."""


class JournalWriter:
    """Effects in order, those after a record when it is written. All methods are for one thread."""

    def __init__(self, append: Callable[[Persist], None], carry_out: Callable[[Effect], None], ready: Callable[[], None]) -> None:
        """`append` writes a record, here or in the thread; `carry_out` does everything else, here; `ready` is called from the thread."""
        self._append, self._carry_out, self._ready = append, carry_out, ready
        self._line: deque[Effect] = deque()
        """What is not carried out yet; it begins with a record that is being written, or is empty."""
        self._ahead = 0
        self._given: queue.SimpleQueue[Persist | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, effects: list[Effect]) -> None:
        """Carry these out, after all that came before."""
        for effect in effects:
            if isinstance(effect, Persist) and (self._line or _size(effect.frames) >= WORTH_BYTES):
                self._hand_over(effect)
            elif self._line:
                self._line.append(effect)
            elif isinstance(effect, Persist):
                self._append(effect)
            else:
                self._carry_out(effect)
        while self._ahead > _MOST_AHEAD:
            self._next(self._written.get())
        self.go_on()

    def go_on(self) -> None:
        """Carry out what waited for records that are written by now. Raises what the journal raised."""
        while self._line and not self._written.empty():
            self._next(self._written.get())

    def drain(self) -> None:
        """Until everything is written and carried out."""
        while self._line:
            self._next(self._written.get())

    def close(self) -> None:
        """Write what is there, and end the thread; what else waits is let go."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None
        self._line.clear()

    def _hand_over(self, record: Persist) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="scribe", daemon=True)
            self._thread.start()
        self._line.append(record)
        self._ahead += 1
        self._given.put(record)

    def _next(self, problem: BaseException | None) -> None:
        """The record at the head of the line is written, or never will be."""
        if problem is not None:
            self._line.clear()
            raise problem
        self._line.popleft()
        self._ahead -= 1
        while self._line and not isinstance(self._line[0], Persist):
            self._carry_out(self._line.popleft())

    def _write(self) -> None:
        while (record := self._given.get()) is not None:
            problem: BaseException | None = None
            try:
                self._append(record)
            except BaseException as error:
                problem = error
            self._written.put(problem)
            self._ready()
            if problem is not None:
                return


def _size(frames: Frames) -> int:
    return sum(len(frame) for frame in frames)
