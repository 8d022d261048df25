"""A process that renders a model's chat templates, or encodes text with a model's tokenizer: both are programs of the model's maker.

Holds: a request that takes too long or too much memory ends the process and raises an error; the next request starts another. Nothing
else of this process waits for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError

SECONDS = 10
START_SECONDS = 120
"""Includes the import of the libraries on a machine that is busy."""
LONGEST_TEXT = 16 << 20
_LONGEST_LINE = 256 << 20
_PROGRAM = Path(__file__).with_name("limited_program.py")


class PromptProcess:
    """`what` names the template or tokenizer in messages; `setup` is what the program makes it of. The process starts with the first
    request; a copy that is sent to another process starts one of its own."""

    def __init__(self, what: str, memory_bytes: int, seconds: int | None = None, **setup: Any) -> None:
        """`seconds`: for each request; null: ten."""
        self.what, self._seconds, self._lock = what, seconds or SECONDS, threading.Lock()
        limits = {"memory_bytes": memory_bytes, "seconds": self._seconds, "longest": LONGEST_TEXT}
        self._setup = json.dumps(setup | limits)
        self._process: subprocess.Popen[str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"what": self.what, "setup": self._setup, "seconds": self._seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.what, self._setup, self._seconds = state["what"], state["setup"], state["seconds"]
        self._lock, self._process = threading.Lock(), None

    def start(self) -> None:
        """Start the process, if none runs. Raises ShoalError where nothing can be made of the setup."""
        with self._lock:
            self._running()

    def ask(self, request: Any) -> Any:
        """What the template or tokenizer makes of a request. Raises ShoalError."""
        with self._lock:
            return self._exchanged(self._running(), json.dumps(request), self._seconds)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
        return self._process

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", str(_PROGRAM)]
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, text=True, encoding="utf-8")
        weakref.finalize(self, _end, process)
        try:
            self._exchanged(process, self._setup, START_SECONDS)
        except ShoalError:
            _end(process)
            raise
        return process

    def _exchanged(self, process: subprocess.Popen[str], line: str, seconds: float) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline(_LONGEST_LINE)
        except OSError:  # it has ended
            answer = ""
        finally:
            timer.cancel()
        if not answer.endswith("\n"):
            _end(process)
            raise ShoalError(f"{self.what} was stopped: it took more than {seconds} seconds, or more memory than it may")
        reply = json.loads(answer)
        if "error" in reply:
            raise ShoalError(f"{self.what} refuses this request: {reply['error']}")
        return reply["answer"]


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was not written yet cannot be
                continue
    process.wait()
