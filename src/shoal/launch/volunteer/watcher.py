"""The watcher of a worker that gives way: a small process without torch. It starts the worker when the conditions of `--when` hold, and
asks it to leave when one of them holds no more.

The worker is a process of its own with all that it needs; when it ends, its memory is free. The watcher talks to it through the worker's
standard input: the first line is the invitation, later lines are commands (`WorkerCommand`). The worker leaves when that pipe closes, so it
never outlives the watcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.errors import ShoalError
from shoal.launch.volunteer.conditions import Conditions
from shoal.launch.volunteer.limits import let_leave
from shoal.process_exit import DECLINED, PAUSED, RUN_STOPPED

LEAVE_S = 5.0
"""How long a worker that was asked to leave may take to finish or return what it holds; then it leaves without that."""
KILL_S = 10.0
"""A worker that still runs after this time is killed."""
FIRST_SETTLE_S = 3.0
"""How long a load is measured before the first start."""
_CHECK_S, _LEAVING_CHECK_S = 1.0, 0.1
"""Intervals between two looks at the conditions, and at a worker that leaves."""
_MOST_FAILURES = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
_RUN_STOPPED_S = 60.0
"""Pause before the watcher starts a worker for a run that its owner stopped. That worker waits for the run for ten minutes (--patience)."""
_LONG_RUN_S = 600.0
"""A worker that ran for this long before it failed has not failed in a row."""
_ENDED = (0, 2, DECLINED, 130)
"""Exit codes of a worker whose run is over, that cannot take part, or whose user declined."""


class WorkerProcess:
    """A worker's process, in a session of its own: Ctrl-C reaches the watcher alone, and all that the worker started can be ended."""

    def __init__(self, command: Sequence[str], first_line: str) -> None:
        posix = {"start_new_session": True} if os.name == "posix" else {}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, **posix)  # type: ignore[call-overload]
        self.pid: int = self._process.pid
        self._write(first_line)

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command: `pause` with the reason, or `answer` with what the user typed."""
        self._write(json.dumps(command))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def poll(self) -> int | None:
        """Its exit code; None: it runs."""
        code: int | None = self._process.poll()
        return code

    def let_go(self) -> None:
        """Close its standard input: it leaves."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill it with all that it has started."""
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self.let_go()


def shoal_worker(arguments: Sequence[str], first_line: str) -> WorkerProcess:
    """A process of `shoal` with these arguments."""
    return WorkerProcess([sys.executable, "-m", "shoal", *arguments], first_line)


class Watcher:
    """Starts and pauses one worker."""

    def __init__(
        self,
        conditions: Conditions,
        start: Callable[[], WorkerProcess],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.conditions, self.start, self.report, self.clock = conditions, start, report, clock
        self.worker: WorkerProcess | None = None
        self._stopping = threading.Event()
        self._began_at, self._asked_at = 0.0, 0.0
        """When the worker was started, and asked to leave."""
        self._why = ""
        """Why it was asked to leave; empty: it was not."""
        self._held_since: float | None = None
        self._settle_s = min(FIRST_SETTLE_S, conditions.settle_s)
        self._failures, self._not_before = 0, clock()
        self._told = ""
        self._typed, self._answering = list[str | None](), threading.Lock()

    def run(self) -> int:
        """Watch until the run is over, the worker cannot take part, or `stop` is called; the exit code. Raises ShoalError when the worker
        fails again and again."""
        try:
            while not self._stopping.is_set():
                code = self._turn()
                if code is not None:
                    return code
                self._stopping.wait(_LEAVING_CHECK_S if self._why else _CHECK_S)
            return 0
        finally:
            self._end()

    def stop(self) -> None:
        """Ask the worker to leave, and end. Any thread may call this."""
        self._stopping.set()

    def answer(self, line: str | None) -> None:
        """Pass on what the user typed, to this worker or the next one. None: the user types no more, which answers all questions with no.
        Any thread may call this."""
        with self._answering:
            self._typed.append(line)
            self._pass_answers_on()

    def _pass_answers_on(self) -> None:
        if self.worker is not None:
            for line in self._typed:
                self.worker.send({"answer": line or ""})
            self._typed = [line for line in self._typed if line is None]

    def _turn(self) -> int | None:
        """Look at the worker and at the conditions once; return the exit code when nothing is left to watch."""
        if self.worker is None:
            self._start_if_free()
            return None
        code = self.worker.poll()
        if code is not None:
            return self._ended(code)
        if not self._why:
            if why := self.conditions.why_not(self.worker.pid):
                self._why, self._asked_at = why, self.clock()
                self.report(f"giving way: {why}")
                let_leave(self.worker.pid)
                self.worker.send({"pause": why})
        elif self.clock() - self._asked_at > KILL_S:
            self.worker.kill()
            self.report(f"warning: the worker did not leave within {KILL_S:.0f} s and was killed")
            self._pause()
        return None

    def _start_if_free(self) -> None:
        now, why = self.clock(), self.conditions.why_not()
        if why:
            self._held_since = None
            if why.partition(" use ")[0] != self._told.partition(" use ")[0]:  # the figures of a load change each second
                self.report(f"waiting: {why}")
            self._told = why
            return
        self._held_since = now if self._held_since is None else self._held_since
        if now - self._held_since >= self._settle_s and now >= self._not_before:
            started = self.start()
            with self._answering:
                self.worker, self._began_at, self._told = started, now, ""
                self._pass_answers_on()
            self._settle_s = self.conditions.settle_s

    def _ended(self, code: int) -> int | None:
        assert self.worker is not None
        if self._why or code == PAUSED:
            self.worker.kill()  # what it has started, too
            self._pause()
            return None
        if code in _ENDED:
            return code
        if code == RUN_STOPPED:
            self._not_before = self.clock() + _RUN_STOPPED_S
            self.report(f"the worker starts again in {_RUN_STOPPED_S:.0f} s, in case the run goes on. Ctrl-C ends this")
            self._forget()
            return None
        self._failures = 1 if self.clock() - self._began_at > _LONG_RUN_S else self._failures + 1
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if self._failures >= _MOST_FAILURES:
            raise ShoalError(f"the worker failed {self._failures} times in a row: it {how}")
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._failures - 1))
        self._not_before = self.clock() + pause_s
        self.report(f"warning: the worker {how}; starting it again in {pause_s:.0f} s")
        self.worker.kill()
        self._forget()
        return None

    def _pause(self) -> None:
        took_s = self.clock() - self._asked_at
        self.report(f"paused after {took_s:.1f} s: {self._why}. The worker's memory is free; it starts again when the conditions hold")
        self._told = self._why
        self._forget()

    def _forget(self) -> None:
        self.worker, self._why, self._held_since = None, "", None

    def _end(self) -> None:
        """Let the worker leave, and kill it if it does not."""
        if self.worker is None:
            return
        let_leave(self.worker.pid)
        self.worker.let_go()
        until = time.monotonic() + KILL_S
        while self.worker.poll() is None and time.monotonic() < until:
            time.sleep(_LEAVING_CHECK_S)
        self.worker.kill()
