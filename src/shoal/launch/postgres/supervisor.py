"""A small process between a run and its PostgreSQL: the server ends with the run, however the run ends.

It is started by its path, knows nothing of Shoal, and does one thing: start the server that the first line of its standard input
describes, and shut it down when that input is closed or its parent is gone. On Linux the server also ends when this process is killed.
Where students connect from other machines it also runs the TLS proxy (transports/tls_proxy.py), and restarts it when it ends.
All of them append to one log, whose size is bounded here: strangers can make the server write lines, such as failed logins.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

_POLL_INTERVAL_S = 1.0
_PATIENCE_S = 30.0
_PR_SET_PDEATHSIG = 1
_MOST_BYTES = 2 << 30
"""For one process of the server, shared memory aside. No statement of ours needs a tenth of it; a student's may ask for any amount."""
_MOST_LOG_BYTES = 16 << 20
"""A larger log is emptied, once a second. What was in it last is kept beside it."""


def main() -> None:
    order = json.loads(sys.stdin.readline() or "null")
    if not order:
        return
    parent = os.getppid()
    server = subprocess.Popen(
        order["command"],
        cwd=order["cwd"],
        stdin=subprocess.DEVNULL,
        preexec_fn=_prepared() if sys.platform == "linux" else None,
        **identity(order["user"]),
    )
    over = threading.Event()
    for wait in (sys.stdin.read, server.wait):
        threading.Thread(target=_then_set, args=(wait, over), daemon=True).start()
    fronts: list[subprocess.Popen[bytes]] = []
    if order["front"]:
        threading.Thread(target=_keep_front, args=(order["front"], over, fronts), daemon=True).start()
    while not over.wait(_POLL_INTERVAL_S) and os.getppid() == parent:
        bound_log(order["log"], _MOST_LOG_BYTES)
    over.set()
    for front in fronts:
        front.kill()
    _stop(server, order["stop"])


def _keep_front(order: dict[str, Any], over: threading.Event, fronts: list[subprocess.Popen[bytes]]) -> None:
    """Start the front, and start it again when it ends. It ends with this process, which holds its standard input."""
    while not over.is_set():
        front = subprocess.Popen([sys.executable, "-I", order["program"]], stdin=subprocess.PIPE)
        fronts[:] = [front]
        assert front.stdin is not None
        front.stdin.write(json.dumps(order).encode() + b"\n")
        front.stdin.flush()
        front.wait()
        over.wait(_POLL_INTERVAL_S)


def bound_log(log: str, most_bytes: int) -> None:
    """Empty a log that has grown too large; its end is kept beside it, in a file with `.1` at the end of its name. The writers of the log
    append, so they go on at its new end. The log is emptied first: the disk may be full."""
    with contextlib.suppress(OSError):
        if os.path.getsize(log) <= most_bytes:
            return
        with open(log, "r+b") as full:
            full.seek(-most_bytes, os.SEEK_END)
            end = full.read(most_bytes)
            full.truncate(0)
        with open(os.open(f"{log}.1", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as kept:
            kept.write(end)


def identity(user: list[int] | None) -> dict[str, Any]:
    """The arguments of Popen that set a program's user: [uid, gid], or None for the user of this process."""
    return {"user": user[0], "group": user[1], "extra_groups": []} if user else {}


def _prepared() -> Callable[[], None]:
    """A function for a new process: it ends with its parent, and the memory of it and its children is bounded. It must load nothing."""
    import ctypes
    import resource

    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))

    return prepare


def _then_set(wait: Callable[[], object], over: threading.Event) -> None:
    wait()
    over.set()


def _stop(server: subprocess.Popen[bytes], command: list[str]) -> None:
    """A fast shutdown: open transactions are rolled back, committed ones are on the disk."""
    if sys.platform == "win32":
        subprocess.run(command, stdin=subprocess.DEVNULL)
    else:
        server.send_signal(signal.SIGINT)
    try:
        server.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        server.kill()


if __name__ == "__main__":
    main()
