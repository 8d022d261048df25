"""Processes of Shoal on this machine, forked from one that has loaded the libraries already.

Loading torch takes seconds of a core and hundreds of megabytes. The fork server has loaded it once and does nothing else: it has no
threads, no network connections, and has never touched a GPU. A process that it forks begins within a tenth of a second and shares its
memory, so ten workers start as quickly as one. The garbage collector of such a process leaves the libraries' objects alone: it would
write to nearly all of their memory, which is then not shared any more. Forked processes use the same fork server for their own children.
It ends when no process is connected to it any more.

macOS has libraries that do not survive a fork, and Windows has no fork: there each process is started with a new interpreter.
"""

from __future__ import annotations

import contextlib
import gc
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
from typing import IO, Any, NoReturn

from shoal.errors import ShoalError
from shoal.process_exit import end_process
from shoal.process_title import set_title

_LOADED = (
    "torch.distributed",
    "numpy.random",
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "zmq",
    "safetensors.torch",
    "shoal.cli.main",
    "shoal.cli.join_worker",
    "shoal.runs.worker_run",
    "shoal.runs.build_run",
    "shoal.runs.coordinator_setup",
    "shoal.transports.zeromq.tunnel",
    "shoal.launch.start",
    "shoal.reporters.progress",
)
_POLL_INTERVAL_S = 0.01
_MOST_BYTES = 1 << 20


class OpenedProcess(subprocess.Popen[bytes]):
    """A program with a pipe as its standard input."""

    stdin: IO[bytes]


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

    `loads`: modules that it will need, and that start no threads and touch no GPU: the fork server imports them once.
    """
    if sys.platform != "linux":
        return OpenedProcess(
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
    output = [
        number if stream is None else stream if isinstance(stream, int) else stream.fileno()
        for number, stream in ((1, stdout), (2, stderr))
    ]
    process = _connection().start(order, output) or _connection().start(order, output)  # the fork server may just have been killed
    if process is None:
        raise ShoalError("the process that starts others on this machine ends at once; its error is printed above")
    return process


def prepare() -> None:
    """Start the fork server, so that it has loaded its libraries when the first process is started."""
    if sys.platform == "linux":
        _connection()


class ForkedProcess:
    """A process that the fork server forked for this one."""

    def __init__(self, server: ForkServerConnection, pid: int, stdin: IO[bytes]) -> None:
        self.server, self.pid, self.stdin = server, pid, stdin
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.server.refresh(self)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(["shoal"], timeout or 0.0)
            time.sleep(_POLL_INTERVAL_S)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            self.server.signal(self.pid, sig)


ChildProcess = OpenedProcess | ForkedProcess
"""A process that was started here."""


class MessageStream:
    """JSON messages over a local socket, one on each line, and the file descriptors that came with them."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.descriptors: list[int] = []
        self._unread = b""
        self._arrived = select.poll()  # unlike select(), it takes descriptors of any number
        self._arrived.register(line, select.POLLIN)

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Returns False where the other side is gone."""
        text = json.dumps(message).encode() + b"\n"
        try:
            sent = socket.send_fds(self.line, [text], descriptors)
            self.line.sendall(text[sent:])
        except OSError:
            return False
        return True

    def receive(self, wait: bool = False) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None where the other side is gone."""
        if not self._arrived.poll(None if wait else 0):
            return []
        try:
            received, descriptors, _, _ = socket.recv_fds(self.line, _MOST_BYTES, 16)
        except OSError:
            return None
        self.descriptors += descriptors
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None


def write_line(process: ChildProcess, text: str) -> None:
    """Send a line to a process, which reads it from its standard input."""
    process.stdin.write(text.encode() + b"\n")
    process.stdin.flush()


class ForkServerConnection:
    """This process's connection to the fork server. Threads may share it.

    Holds: an exit code belongs to the process that ended. The system gives its pid to a later process, which has none yet."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process`: the fork server, where this process started it."""
        self.messages, self.process = MessageStream(line), process
        self._lock = threading.Lock()
        self._running: dict[int, ForkedProcess] = {}
        self._alive = True

    @property
    def alive(self) -> bool:
        with self._lock:
            self._receive()
            return self._alive

    def start(self, order: dict[str, Any], output: list[int]) -> ForkedProcess | None:
        """Fork a process; None where the fork server has ended."""
        reading, writing = os.pipe()
        stdin = os.fdopen(writing, "wb")
        try:
            with self._lock:
                self._alive = self.messages.send({"start": order}, [reading, *output])
                while self._alive:
                    if (process := self._receive(wait=True, stdin=stdin)) is not None:
                        return process
        finally:
            os.close(reading)
        stdin.close()
        return None

    def refresh(self, process: ForkedProcess) -> None:
        """Set the exit code of a process that has ended, as `subprocess` gives it."""
        with self._lock:
            self._receive()
            if process.returncode is None and not self._alive and not _exists(process.pid):
                process.returncode = -signal.SIGKILL  # the real exit code is lost with the fork server

    def signal(self, pid: int, number: int) -> None:
        """Send a signal through the fork server, which knows whether the pid still belongs to this process."""
        with self._lock:
            self._alive = self._alive and self.messages.send({"signal": [pid, number]})
        if not self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _receive(self, wait: bool = False, stdin: IO[bytes] | None = None) -> ForkedProcess | None:
        """Read the messages that have arrived; `wait`: until there are some. Returns the process that was forked, if it is among them;
        `stdin`: the pipe to it."""
        received, started = self.messages.receive(wait) if self._alive else None, None
        self._alive = received is not None
        for message in received or ():
            if "pid" in message:
                assert stdin is not None, "processes are started one at a time"
                started = self._running[message["pid"]] = ForkedProcess(self, message["pid"], stdin)
            else:
                self._running.pop(message["ended"]).returncode = message["code"]
        return started


_own_connection: ForkServerConnection | None = None
_making = threading.Lock()


def _connection() -> ForkServerConnection:
    """The fork server of this process, or a new one where it has ended."""
    global _own_connection
    with _making:
        if _own_connection is None or not _own_connection.alive:
            ours, theirs = socket.socketpair()
            with theirs:
                # OpenBLAS starts its threads when it is loaded, and a fork server must have none
                environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
                command = [sys.executable, "-c", "from shoal.launch.forkserver import main; main()", str(theirs.fileno())]
                quiet, passed = subprocess.DEVNULL, [theirs.fileno()]
                _own_connection = ForkServerConnection(
                    ours, subprocess.Popen(command, stdin=quiet, stdout=quiet, pass_fds=passed, env=environ)
                )
        return _own_connection


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- the fork server itself --------------------------------------------------------------------------


class ForkServer:
    """The loop of the fork server. It returns in the processes that it forks."""

    def __init__(self, line: socket.socket) -> None:
        self.clients = [MessageStream(line)]
        self.parents: dict[int, MessageStream] = {}
        self.woken, self.waking = os.pipe()
        os.set_blocking(self.waking, False)
        os.set_blocking(self.woken, False)
        signal.set_wakeup_fd(self.waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the clients decide what follows

    def serve(self) -> dict[str, Any] | None:
        """In a forked process: its order. In the fork server: None, when the last client is gone."""
        while self.clients:
            watched: list[int | socket.socket] = [self.woken, *(client.line for client in self.clients)]
            ready, _, _ = select.select(watched, [], [])
            if self.woken in ready:
                os.read(self.woken, 4096)
                self._report_ended()
            for client in [one for one in self.clients if one.line in ready]:
                questions = client.receive()
                if questions is None:
                    client.line.close()
                    self.clients.remove(client)
                for question in questions or ():
                    if (order := self._answer(client, question)) is not None:
                        return order
        return None

    def _answer(self, client: MessageStream, question: dict[str, Any]) -> dict[str, Any] | None:
        if "signal" in question:
            pid, number = question["signal"]
            if pid in self.parents:
                os.kill(pid, number)
            return None
        descriptors, client.descriptors = client.descriptors[:3], client.descriptors[3:]
        for name in question["start"]["loads"]:
            with contextlib.suppress(ImportError):  # the process that needs it reports that
                importlib.import_module(name)
        gc.freeze()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._leave()
            ours.close()
            return {**question["start"], "descriptors": descriptors, "line": theirs}
        theirs.close()
        for descriptor in descriptors:
            os.close(descriptor)
        self.clients.append(MessageStream(ours))
        self.parents[pid] = client
        client.send({"pid": pid})
        return None

    def _report_ended(self) -> None:
        """Report processes that have ended to the clients that started them."""
        while self.parents:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.parents.pop(pid).send({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _leave(self) -> None:
        """In a forked process: close everything that belongs to the fork server."""
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
    global _own_connection
    _own_connection = ForkServerConnection(order["line"])
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
    set_title([sys.executable, *order["arguments"], *rank])
    if (path := os.environ.get("PYTHONPATH", "")) != before:
        sys.path[1:1] = [entry for entry in path.split(os.pathsep) if entry]


def _open_streams() -> None:
    """Reopen the standard streams, as the interpreter does when it starts."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=at_once)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _set_threads() -> None:
    """Apply OMP_NUM_THREADS, which OpenMP read when torch was loaded."""
    if (count := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        import torch

        torch.set_num_threads(max(1, int(count)))


def _run(arguments: list[str]) -> None:
    """Run `-m MODULE …` or `FILE …` as the interpreter does."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> NoReturn:
    set_title([sys.executable, "fork server of shoal"])
    line = socket.socket(fileno=int(sys.argv[1]))
    server = ForkServer(line)
    gc.disable()  # nothing that a module makes when it is loaded is garbage
    for name in _LOADED:
        importlib.import_module(name)
    order = server.serve()
    gc.enable()
    if order is not None:
        _become(order)
        try:
            _run(order["arguments"])
        except SystemExit as ended:
            if not isinstance(ended.code, int | None):
                raise
            end_process(ended.code or 0)
    end_process(0)
