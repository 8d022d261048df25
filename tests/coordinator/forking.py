"""Commands of ours as forks of a process that has loaded everything already: real processes, which start in a moment instead of seconds.

A test talks to that process in lines of JSON: `{"start": …}` forks a command and answers with its number, `{"wait": …}` says how it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LOADED = ("shoal.cli.coordinate", "shoal.cli.join", "shoal.launch.starting", "shoal.runs.coordinating", "shoal.runs.joining", "psycopg")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Cradle:
    """The process that forks. Whatever it forked ends with it."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT)
        assert self._ask({"hello": True}) == "loaded"

    def start(self, arguments: list[str], log: Path, given: str, folder: Path | None = None) -> Forked:
        asked = {"start": arguments, "log": str(log), "given": given, "folder": str(folder or Path.cwd())}
        return Forked(self, self._ask(asked))

    def ended(self, pid: int) -> int | None:
        """The status of one that has ended."""
        found: int | None = self._ask({"wait": pid})
        return found

    def _ask(self, asked: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Forked:
    """One forked process, with what tests use of `Popen`."""

    stdin = None

    def __init__(self, cradle: Cradle, pid: int) -> None:
        self.cradle, self.pid = cradle, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.cradle.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float = 300.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


# --- in the process that forks -------------------------------------------------------------------------------------


def _serve() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the test, too
    answers = os.fdopen(os.dup(1), "w")
    for module in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    ends: dict[int, int] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "start" in asked:
            answer: Any = _fork(asked)
        else:
            answer = _status(asked["wait"], ends) if "wait" in asked else "loaded"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _fork(asked: dict[str, Any]) -> int:
    mine, theirs = os.pipe()
    os.write(theirs, asked["given"].encode())
    pid = os.fork()
    if pid:
        os.close(mine)
        return pid  # the other end stays open: who sees its end takes the one that started it for dead
    _become(asked, mine)
    raise AssertionError("not reached")


def _become(asked: dict[str, Any], stdin: int) -> None:
    """Be the command, until it ends."""
    code = 70
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(asked["folder"])
        sys.stdin = os.fdopen(0)
        sys.argv = ["shoal", *asked["start"]]
        from shoal.cli.main import main

        code = main(asked["start"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _status(pid: int, ends: dict[int, int]) -> int | None:
    if pid not in ends:
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            return None
        ends[pid] = os.waitstatus_to_exitcode(status)
    return ends[pid]


if __name__ == "__main__":
    _serve()
