"""What a worker may take of its computer: priority, cores and memory of this process and of all that it starts.

**Memory** (`--memory 2G`) is bounded twice. On Linux each process gets RLIMIT_DATA: an allocation beyond it fails inside the process, which
then ends with an error that says so (units of work are first tried in smaller parts). On every system a thread looks four times a
second at the memory of the process with all that it started, and ends the worker when it is above the limit. Pages of files do not count:
the system takes them back when it needs them. Nor does the memory of GPUs.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.launch.volunteer.process_tree import memory_bytes

LEAST_MEMORY = 512 << 20
"""Python with torch and a small model takes about 350 MB."""
_CHECK_S = 0.25
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "armv7l": 314, "armv6l": 314, "i686": 289, "ppc64le": 273, "s390x": 282}
"""Numbers of the system call ioprio_set, by the processor."""
_IOPRIO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13
_DARWIN_PROCESS, _DARWIN_BACKGROUND = 4, 0x1000
"""PRIO_DARWIN_PROCESS and PRIO_DARWIN_BG: lowest priority for processors, disk and network."""
_SESSION_TRIES, _SESSION_PAUSE_S = 5, 0.11
"""Linux lets users change a session's priority ten times a second, all together."""
_WINDOWS_IDLE, _WINDOWS_BACKGROUND = 0x40, 0x00100000
"""IDLE_PRIORITY_CLASS, and PROCESS_MODE_BACKGROUND_BEGIN, which lowers the priority of disk and memory, too."""


def take_lowest_priority(windows: Any = None) -> list[str]:
    """Give this process, its later threads and its children the lowest priority for processors and disk; returns what took effect."""
    if windows is not None or sys.platform == "win32":
        return _lowest_on_windows((windows or getattr(ctypes, "windll")).kernel32)  # noqa: B009 - the attribute exists on Windows only
    if sys.platform == "darwin":
        library = ctypes.CDLL(None)
        return ["background"] if library.setpriority(_DARWIN_PROCESS, 0, _DARWIN_BACKGROUND) == 0 else _nicest()
    taken = (_idle_class() or _nicest()) + _last_session()
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None and ctypes.CDLL(None).syscall(number, _IOPRIO_PROCESS, 0, _IOPRIO_IDLE) == 0:
        taken.append("idle disk priority")
    return taken


def _idle_class() -> list[str]:
    if not hasattr(os, "SCHED_IDLE"):
        return []
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return ["SCHED_IDLE"]
    return []


def _last_session() -> list[str]:
    """Linux divides the processors between sessions first, and only then by priority: two SCHED_IDLE processes in a session of their own
    took 1.0 s beside two others that got 0.5 s; with this, 0.03 s."""
    leads = hasattr(os, "getsid") and os.getsid(0) == os.getpid()
    return ["lowest session priority"] if leads and _set_session(os.getpid(), 19) else []


def let_leave(pid: int) -> None:
    """Give a worker that is asked to leave time on the processors again: beside programs that use all of them it would get next to none,
    and could not return what it holds."""
    _set_session(pid, 0)


def _set_session(pid: int, nice: int) -> bool:
    file = Path(f"/proc/{pid}/autogroup")
    for _ in range(_SESSION_TRIES if file.exists() else 0):
        try:
            file.write_text(str(nice), encoding="ascii")
            return True
        except BlockingIOError:  # a session was changed a moment ago
            time.sleep(_SESSION_PAUSE_S)
        except OSError:
            return False
    return False


def _nicest() -> list[str]:
    if hasattr(os, "nice"):
        with suppress(OSError):
            return [f"nice {os.nice(19)}"]
    return []


def _lowest_on_windows(kernel: Any) -> list[str]:
    process = kernel.GetCurrentProcess()
    names = {_WINDOWS_IDLE: "idle priority", _WINDOWS_BACKGROUND: "background mode"}
    return [name for number, name in names.items() if kernel.SetPriorityClass(process, number)]


def use_cores(count: int) -> None:
    """Let this process and its children use `count` cores. Where the system cannot bind them to cores, the number of threads is the limit.
    To be called before torch is loaded. Raises ShoalError."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 1 <= count <= here:
        raise ShoalError(f"--cores {count}: this computer has {here}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-count:])  # the system's own work tends to be on the first ones
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(count)


def bound_allocations(limit_bytes: int) -> bool:
    """Let allocations of this process and of its children fail beyond the limit, for each of them; whether the system does that."""
    if sys.platform != "linux":
        return False
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    return True


class MemoryCheck:
    """A thread that calls `exceeded` once, with the bytes in use, when this process and its children use more than the limit."""

    def __init__(self, limit_bytes: int, exceeded: Callable[[int], None], measure: Callable[[int], int] = memory_bytes) -> None:
        self.limit_bytes, self.exceeded, self.measure = limit_bytes, exceeded, measure
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="memory check", daemon=True).start()

    def _watch(self) -> None:
        while not self._closing.wait(_CHECK_S):
            if (used := self.measure(os.getpid())) > self.limit_bytes:
                self.exceeded(used)
                return

    def close(self) -> None:
        self._closing.set()


def parse_memory(text: str) -> int:
    """Bytes of `2G`, `1500M`. Raises ShoalError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT])(?:i?B)?", text, re.IGNORECASE)
    if found is None:
        raise ShoalError(f"--memory {text}: an amount such as 2G or 1500M is expected")
    count = int(float(found[1]) * 1024 ** (2 + "MGT".index(found[2].upper())))
    if count < LEAST_MEMORY:
        raise ShoalError(f"--memory {text}: a worker needs {LEAST_MEMORY >> 20}M at least")
    return count


LEAST_UPLOAD = 500_000 / 8
"""Bytes per second. A worker takes a message for lost that is slower than 50,000 bytes per second."""


def parse_upload(text: str) -> float:
    """Bytes per second of `5mbit`, `800kbit`. Raises ShoalError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg])bit(?:/s)?", text, re.IGNORECASE)
    if found is None:
        raise ShoalError(f"--upload {text}: a rate such as 5mbit or 800kbit is expected")
    rate = float(found[1]) * 1000 ** (1 + "kmg".index(found[2].lower())) / 8
    if rate < LEAST_UPLOAD:
        raise ShoalError(f"--upload {text}: a worker needs {LEAST_UPLOAD * 8 / 1000:g}kbit at least")
    return rate
