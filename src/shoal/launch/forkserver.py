"""Processes of Shoal on this machine, forked from one that has loaded the libraries already.

To load torch takes seconds of a core and hundreds of megabytes. A nursery is a process that has done so once, and does nothing else: it has
no threads, no connections, and has never touched a GPU. A process that it forks begins within a tenth of a second and shares its memory, so
ten workers start as quickly as one, and a worker that was killed is back at once. Whoever was forked from a nursery asks the same one for
processes of its own. The nursery ends when nobody is left who could ask it.

macOS has libraries that do not survive a fork, and Windows has no fork: there each process is started afresh.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from shoal.errors import ShoalError
from shoal.process_exit import end_process

_LOADED = (
    "torch.distributed",
    "zmq",
    "safetensors.torch",
    "shoal.cli.main",
    "shoal.cli.join",
    "shoal.runs.worker_run",
    "shoal.runs.build_run",
    "shoal.runs.coordinator_setup",
    "shoal.transports.zeromq",
    "shoal.launch.start",
    "shoal.reporters.progress",
)
_LOOK_S = 0.01
_MOST_BYTES = 1 << 20


class ChildProcess(Protocol):
    """A process that was started here: what `subprocess.Popen` offers, as far as it is used."""

    pid: int
    returncode: Any
    stdin: Any

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...


def start(
    arguments: Sequence[str],
    *,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    start_new_session: bool = False,
    loads: Sequence[str] = (),
) -> ChildProcess:
    """A Python process with these arguments (`-m shoal …`, or a file and its own). Its standard input is a pipe.

    `loads`: modules that it will need, and that start no threads and touch no GPU: the nursery loads them once for all that it forks.
    """
    if sys.platform != "linux":
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=start_new_session,
        )
    order = {
        "arguments": list(arguments),
        "env": dict(os.environ if env is None else env),
        "cwd": os.path.abspath(cwd or os.getcwd()),
        "session": start_new_session,
        "loads": list(loads),
    }
    output = [_number(1, stdout), _number(2, stderr)]
    process = _nursery().start(order, output) or _nursery().start(order, output)  # a nursery may have been killed just now
    if process is None:
        raise ShoalError("the process that starts others on this machine ends at once; what it said stands above")
    return process


def prepare() -> None:
    """Let the nursery begin to load, so that it is ready when the first process is asked for."""
    if sys.platform == "linux":
        _nursery()


def _number(default: int, stream: IO[bytes] | int | None) -> int:
    return default if stream is None else stream if isinstance(stream, int) else stream.fileno()


class ForkedProcess:
    """A process that the nursery forked for this one."""

    def __init__(self, nursery: ForkServerConnection, pid: int, stdin: IO[bytes]) -> None:
        self.nursery, self.pid, self.stdin = nursery, pid, stdin
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.nursery.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(["shoal"], timeout or 0.0)
            time.sleep(_LOOK_S)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            self.nursery.signal(self.pid, sig)


class ForkServerConnection:
    """This process's connection to a nursery. Threads may share it."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process`: the nursery itself, where this process started it."""
        self.line, self.process = line, process
        self._lock = threading.Lock()
        self._unread = b""
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}
        self._alive = True

    @property
    def alive(self) -> bool:
        with self._lock:
            self._hear()
            return self._alive

    def start(self, order: dict[str, Any], output: list[int]) -> ForkedProcess | None:
        """None: the nursery has ended."""
        reading, writing = os.pipe()
        stdin = os.fdopen(writing, "wb")
        try:
            with self._lock:
                self._ask({"start": order}, [reading, *output])
                while not self._pids and self._alive:
                    select.select([self.line], [], [])
                    self._hear()
                if self._pids:
                    return ForkedProcess(self, self._pids.pop(), stdin)
        finally:
            os.close(reading)
        stdin.close()
        return None

    def ended(self, pid: int) -> int | None:
        """The exit code of a process that has ended, as `subprocess` gives it."""
        with self._lock:
            self._hear()
            if pid not in self._codes and not self._alive and not _exists(pid):
                return -signal.SIGKILL  # nobody is left who could know better
            return self._codes.get(pid)

    def signal(self, pid: int, number: int) -> None:
        """The nursery passes it on: it alone knows whether the number still means this process."""
        with self._lock:
            if self._alive:
                self._ask({"signal": [pid, number]}, [])
        if not self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _ask(self, message: dict[str, Any], descriptors: list[int]) -> None:
        text = json.dumps(message).encode() + b"\n"
        try:
            sent = socket.send_fds(self.line, [text], descriptors)
            self.line.sendall(text[sent:])
        except OSError:
            self._alive = False

    def _hear(self) -> None:
        """Take in what has been said, without waiting."""
        while self._alive:
            try:
                said = self.line.recv(_MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            self._alive = bool(said)
            *lines, self._unread = (self._unread + said).split(b"\n")
            for line in map(json.loads, lines):
                if "pid" in line:
                    self._pids.append(line["pid"])
                else:
                    self._codes[line["ended"]] = line["code"]


_mine: ForkServerConnection | None = None
_making = threading.Lock()


def _nursery() -> ForkServerConnection:
    """The nursery that this process was forked from, or one of its own, or a new one where that has ended."""
    global _mine
    with _making:
        if _mine is None or not _mine.alive:
            ours, theirs = socket.socketpair()
            with theirs:
                # One thread for NumPy's products: others would be started when the library is loaded, and a nursery has none
                environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
                command = [sys.executable, "-c", "from shoal.launch.forkserver import main; main()", str(theirs.fileno())]
                quiet, passed = subprocess.DEVNULL, [theirs.fileno()]
                _mine = ForkServerConnection(ours, subprocess.Popen(command, stdin=quiet, stdout=quiet, pass_fds=passed, env=environ))
        return _mine


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- the nursery itself ------------------------------------------------------------------------------


class ForkClient:
    """One who may ask for processes, and what has been heard of the question so far."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.unread = b""
        self.descriptors: list[int] = []

    def hear(self) -> list[dict[str, Any]] | None:
        """The questions that have come; None: the client is gone."""
        try:
            said, descriptors, _, _ = socket.recv_fds(self.line, _MOST_BYTES, 16)
        except OSError:
            return None
        self.descriptors += descriptors
        *lines, self.unread = (self.unread + said).split(b"\n")
        return [json.loads(line) for line in lines] if said else None

    def say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # whoever is gone does not want to know
            self.line.sendall(json.dumps(message).encode() + b"\n")


class ForkServer:
    """The nursery's own loop. It returns in the processes that it forks."""

    def __init__(self, line: socket.socket) -> None:
        self.clients = [ForkClient(line)]
        self.parents: dict[int, ForkClient] = {}
        self.woken, self.waking = os.pipe()
        os.set_blocking(self.waking, False)
        os.set_blocking(self.woken, False)
        signal.set_wakeup_fd(self.waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; those that work decide what follows

    def serve(self) -> dict[str, Any] | None:
        """What a forked process is to do. In the nursery itself: None, when everybody is gone."""
        while self.clients:
            watched: list[int | socket.socket] = [self.woken, *(client.line for client in self.clients)]
            ready, _, _ = select.select(watched, [], [])
            if self.woken in ready:
                os.read(self.woken, 4096)
                self._bury()
            for client in [one for one in self.clients if one.line in ready]:
                questions = client.hear()
                if questions is None:
                    client.line.close()
                    self.clients.remove(client)
                for question in questions or ():
                    if (order := self._answer(client, question)) is not None:
                        return order
        return None

    def _answer(self, client: ForkClient, question: dict[str, Any]) -> dict[str, Any] | None:
        if "signal" in question:
            pid, number = question["signal"]
            if pid in self.parents:
                os.kill(pid, number)
            return None
        descriptors, client.descriptors = client.descriptors[:3], client.descriptors[3:]
        for name in question["start"]["loads"]:
            with contextlib.suppress(ImportError):  # whoever needs it says so itself
                importlib.import_module(name)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._leave()
            ours.close()
            return {**question["start"], "descriptors": descriptors, "line": theirs}
        theirs.close()
        for descriptor in descriptors:
            os.close(descriptor)
        self.clients.append(ForkClient(ours))
        self.parents[pid] = client
        client.say({"pid": pid})
        return None

    def _bury(self) -> None:
        """Tell who asked for a process that it has ended."""
        while self.parents:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.parents.pop(pid).say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _leave(self) -> None:
        """In a forked process: nothing of the nursery stays open here."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for client in self.clients:
            client.line.close()
            for descriptor in client.descriptors:
                os.close(descriptor)
        os.close(self.woken)
        os.close(self.waking)


def _become(order: dict[str, Any]) -> None:
    """Make this forked process what `python ARGUMENTS` would be."""
    global _mine
    _mine = ForkServerConnection(order["line"])
    if order["session"]:
        os.setsid()
    for number, descriptor in enumerate(order["descriptors"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    _open_streams()
    _set_threads()
    rank = [f"[rank {os.environ['RANK']}]"] if "RANK" in os.environ else []
    _show_as(*order["arguments"], *rank)
    if (path := os.environ.get("PYTHONPATH", "")) != before:
        sys.path[1:1] = [entry for entry in path.split(os.pathsep) if entry]


def _open_streams() -> None:
    """The interpreter looks at its streams when it starts, and these are others."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=at_once)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _set_threads() -> None:
    """OpenMP has read its variable when torch was loaded."""
    if (count := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        import torch

        torch.set_num_threads(max(1, int(count)))


def _show_as(*arguments: str) -> None:
    """What `ps` and `top` show of this process. The first call must come before anything changes the environment."""
    import setproctitle

    setproctitle.setproctitle(" ".join([sys.executable, *arguments]))


def _run(arguments: list[str]) -> None:
    """As the interpreter itself does with its arguments."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> NoReturn:
    _show_as("nursery of shoal")
    line = socket.socket(fileno=int(sys.argv[1]))
    server = ForkServer(line)
    for name in _LOADED:
        importlib.import_module(name)
    order = server.serve()
    if order is not None:
        _become(order)
        try:
            _run(order["arguments"])
        except SystemExit as ended:
            if not isinstance(ended.code, int | None):
                raise
            end_process(ended.code or 0)
    end_process(0)
