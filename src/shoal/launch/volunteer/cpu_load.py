"""The share of the processors that programs other than a worker use."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ShoalError
from shoal.launch.volunteer.process_tree import cpu_seconds

WINDOW_S = 3.0
"""The share is the mean over this time: shorter than what a person waits for, longer than one refresh of a page."""


class LoadSample(NamedTuple):
    at: float
    busy_s: float
    """Processor seconds of all programs since some time in the past."""
    own_s: float
    """Those of the worker's process and its children."""
    pid: int | None


class OtherLoad:
    """Measures from call to call."""

    def __init__(
        self,
        busy_seconds: Callable[[], float | None] | None = None,
        own_seconds: Callable[[int], float] = cpu_seconds,
        clock: Callable[[], float] = time.monotonic,
        cores: int | None = None,
    ) -> None:
        self.busy_seconds, self.own_seconds, self.clock = busy_seconds or busy_seconds_here, own_seconds, clock
        self.cores = cores or os.cpu_count() or 1
        self._samples: deque[LoadSample] = deque()

    def share(self, pid: int | None) -> float:
        """The mean share over the last seconds, without the process of this number and its children; 0 at the first call. Raises
        ShoalError where the system does not report it."""
        busy_s = self.busy_seconds()
        if busy_s is None:
            raise ShoalError("--when load: this system does not report how busy its processors are")
        now = LoadSample(self.clock(), busy_s, 0.0 if pid is None else self.own_seconds(pid), pid)
        if self._samples and self._samples[-1].pid != pid:
            # Another worker, or none: its processor time begins anew, so a period with both would count one of them as another program
            self._samples.clear()
        self._samples.append(now)
        while len(self._samples) > 2 and now.at - self._samples[1].at >= WINDOW_S:
            self._samples.popleft()
        first = self._samples[0]
        passed_s = (now.at - first.at) * self.cores
        share = (now.busy_s - first.busy_s - now.own_s + first.own_s) / passed_s if passed_s > 0 else 0.0
        return min(1.0, max(0.0, share))


def busy_seconds_here() -> float | None:
    """Processor seconds that all programs of this computer have used; None where the system does not report them."""
    if sys.platform == "darwin":
        return macos_busy_s()
    return windows_busy_s() if sys.platform == "win32" else linux_busy_s()


def linux_busy_s(file: Path = Path("/proc/stat")) -> float | None:
    try:
        fields = file.read_text(encoding="ascii").partition("\n")[0].split()
        user, nice, system, _, _, irq, softirq = map(int, fields[1:8])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


_CPU_LOAD, _STATES = 3, 4
"""HOST_CPU_LOAD_INFO, and its counters: user, system, idle and nice."""


def macos_busy_s(library: Any = None) -> float | None:
    """By host_statistics, in ticks of 10 ms."""
    library = library or ctypes.CDLL(None)
    ticks, count = (ctypes.c_uint32 * _STATES)(), ctypes.c_uint32(_STATES)
    if library.host_statistics(library.mach_host_self(), _CPU_LOAD, ticks, ctypes.byref(count)) != 0:
        return None
    user, system, _, nice = ticks
    return (user + system + nice) / 100


def windows_busy_s(windows: Any = None) -> float | None:
    """By GetSystemTimes, in units of 100 ns; the kernel's time includes the idle time."""
    windows = windows or getattr(ctypes, "windll", None)
    idle, kernel, user = (ctypes.c_uint64() for _ in range(3))
    if windows is None or not windows.kernel32.GetSystemTimes(ctypes.byref(idle), ctypes.byref(kernel), ctypes.byref(user)):
        return None
    return (kernel.value + user.value - idle.value) / 1e7
