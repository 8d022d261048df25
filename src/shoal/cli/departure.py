"""How a worker's process leaves: on a signal, when the process that started it ends, or for a while when a watcher asks it to."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from shoal.cli.main import print_log, report
from shoal.errors import ShoalError
from shoal.launch.volunteer.watcher import LEAVE_S
from shoal.process_exit import PAUSED as PAUSED_CODE
from shoal.process_exit import RUN_STOPPED
from shoal.protocol.messages import INTERRUPTED, PAUSED

if TYPE_CHECKING:
    from shoal.runs.worker_run import JoinedWorker

_AFTER_PARENT_S = 5.0
_FAREWELL_S = 2.5
_MOST_BYTES = 4096
_LONGEST_LINE = 1 << 16


class Departure:
    """What this process does when it is asked to leave."""

    def __init__(self) -> None:
        self.stops: list[Callable[[str], None]] = []
        """Called with the reason for the run's owner; empty: the worker leaves by its user's choice."""
        self.joined: JoinedWorker | None = None
        """The worker that computes in this process."""
        self.paused = False
        """Whether a watcher asked this worker to leave for a while."""
        self.problem = ""
        """Why the worker must not go on, for its user."""
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Lines that the user typed, which the watcher passes on."""
        self._signals = 0

    def listen(self, with_parent: bool) -> None:
        """Leave on a signal, and at once on a second one. `with_parent`: also when the process that started this one ends, or asks for
        it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if with_parent:
            threading.Thread(target=self._read_commands, name="standard-input", daemon=True).start()

    def exit_code(self, watched: bool = False) -> int:
        """The exit code after the work. Raises ShoalError where the worker was ended by a limit. `watched`: a watcher has started it."""
        if self.problem:
            raise ShoalError(self.problem)
        over = self.joined is not None and self.joined.protocol.done
        if watched and over and self.joined is not None and self.joined.protocol.outcome == INTERRUPTED:
            return RUN_STOPPED
        return PAUSED_CODE if self.paused and not over else 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1 or not self.stops:
            os._exit(130)
        # From another thread: this one may be inside a write to the same stream, which Python does not allow to nest
        threading.Thread(
            target=print_log, args=("leaving after this step; Ctrl-C once more leaves at once",), name="leaving", daemon=True
        ).start()
        self._stop("")

    def _stop(self, reason: str) -> None:
        for stop in self.stops:
            stop(reason)

    def _read_commands(self) -> None:
        """Carry out the lines that come on standard input, until it is closed."""
        rest = b""
        while data := os.read(0, _MOST_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._carry_out(line)
        for stop in self.stops:
            stop("")
            time.sleep(_AFTER_PARENT_S)
        os._exit(0)

    def _carry_out(self, line: bytes) -> None:
        try:
            command: dict[str, Any] = json.loads(line)
        except ValueError:
            return
        if "answer" in command:
            self.answers.put(str(command["answer"]))
        if "pause" in command and not self.paused:
            self.paused = True
            self.answers.put("")  # a question that is open is answered with no
            self.leave_soon(PAUSED + str(command["pause"]), PAUSED_CODE)

    def fail(self, problem: str) -> None:
        """Leave since a limit was exceeded."""
        self.problem = problem
        self.leave_soon(problem, 2)

    def leave_soon(self, reason: str, code: int) -> None:
        """Finish or return what the worker holds, and leave; after some seconds leave without that, and exit with this code."""
        until = time.monotonic() + LEAVE_S
        while not self.stops and time.monotonic() < until:  # it is still joining
            time.sleep(0.02)
        self._stop(reason)
        if self.joined is None and self.stops:
            return  # other processes compute, and leave by themselves
        if self.joined is not None:
            if self.joined.has_left(max(0.0, until - time.monotonic())):
                return
            farewell = threading.Thread(target=self.joined.leave_at_once, name="farewell", daemon=True)
            farewell.start()
            farewell.join(_FAREWELL_S)
        if self.problem:
            report(ShoalError(self.problem))
        sys.stdout.flush()
        os._exit(code)


def first_line() -> str:
    """The first line on standard input, and not a byte more: commands may follow."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE and (byte := os.read(0, 1)):
        line += byte
    return line.decode("utf-8", "replace")
