"""Processor time and memory of a process with all processes that it started.

Linux has both in /proc. On other systems `ps` gives them, which on Windows is not there: there only the process itself is looked at.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from shoal.launch.volunteer.system_programs import output_of

_PROC = Path("/proc")
_STAT_FIELDS = re.compile(r"\) . (\d+) (?:-?\d+ ){9}(\d+) (\d+) (-?\d+) (-?\d+) ")
"""After the name of the program, which may hold anything: the parent, and the ticks of the process and of its children that have ended."""


class ProcessUse(NamedTuple):
    """What one process uses."""

    parent: int
    cpu_s: float
    """Processor time, with that of children that have ended."""
    memory_bytes: int = 0


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of all that it started."""
    if sys.platform == "win32":
        return windows_cpu_s(pid)
    uses = _linux_uses() if _PROC.joinpath("stat").exists() else _ps_uses()
    return sum(uses[one].cpu_s for one in _tree(pid, uses))


def memory_bytes(pid: int) -> int:
    """Memory of a process and of all that it started, without the pages of files, which the system can take back at any time."""
    if sys.platform == "win32":
        return windows_memory_bytes(pid)
    if _PROC.joinpath("stat").exists():
        return sum(_linux_memory_bytes(one) for one in _tree(pid, _linux_uses()))
    uses = _ps_uses()
    return sum(uses[one].memory_bytes for one in _tree(pid, uses))


def _tree(pid: int, uses: dict[int, ProcessUse]) -> set[int]:
    children: dict[int, list[int]] = {}
    for one, use in uses.items():
        children.setdefault(use.parent, []).append(one)
    found, open_ends = set[int](), [pid] if pid in uses else []
    while open_ends:
        one = open_ends.pop()
        if one not in found:
            found.add(one)
            open_ends += children.get(one, ())
    return found


def _linux_uses() -> dict[int, ProcessUse]:
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
    found = dict[int, ProcessUse]()
    for name in os.listdir(_PROC):
        if name.isdigit() and (fields := _STAT_FIELDS.search(_text(_PROC / name / "stat"))):
            parent, *ticks = map(int, fields.groups())
            found[int(name)] = ProcessUse(parent, tick_s * sum(ticks))
    return found


def _linux_memory_bytes(pid: int) -> int:
    """Anonymous and shared memory; pages that several processes share count in part for each."""
    rollup = _text(_PROC / str(pid) / "smaps_rollup")
    kilobytes = re.findall(r"^(?:Pss_Anon|Pss_Shmem):\s*(\d+) kB", rollup, re.MULTILINE)
    if not kilobytes:
        kilobytes = re.findall(r"^(?:RssAnon|RssShmem):\s*(\d+) kB", _text(_PROC / str(pid) / "status"), re.MULTILINE)
    return 1024 * sum(map(int, kilobytes))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # the process has ended
        return ""


def _ps_uses() -> dict[int, ProcessUse]:
    return parse_ps(output_of(["ps", "-A", "-o", "pid=,ppid=,rss=,time="]) or "")


def parse_ps(printed: str) -> dict[int, ProcessUse]:
    """Lines of pid, parent, resident kB and processor time, such as `501 1 2048 1:02.50`."""
    found = dict[int, ProcessUse]()
    for line in printed.splitlines():
        words = line.split()
        if len(words) == 4 and all(word.isdigit() for word in words[:3]):
            days, _, clock = words[3].rpartition("-")
            seconds = 0.0
            for part in clock.split(":"):
                seconds = 60 * seconds + float(part)
            found[int(words[0])] = ProcessUse(int(words[1]), 86400 * int(days or 0) + seconds, 1024 * int(words[2]))
    return found


_QUERY = 0x1000
"""PROCESS_QUERY_LIMITED_INFORMATION"""


def windows_cpu_s(pid: int, windows: Any = None) -> float:
    times = [ctypes.c_uint64() for _ in range(4)]  # creation, exit, kernel and user, in units of 100 ns

    def read(kernel: Any, handle: Any) -> bool:
        return bool(kernel.GetProcessTimes(handle, *map(ctypes.byref, times)))

    return (times[2].value + times[3].value) / 1e7 if _ask_windows(pid, read, windows) else 0.0


class _MemoryCounters(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        *((name, ctypes.c_size_t) for name in ("peak", "working_set", "pp", "p", "npp", "np", "pagefile", "peak_pagefile", "private")),
    )


def windows_memory_bytes(pid: int, windows: Any = None) -> int:
    counters = _MemoryCounters(ctypes.sizeof(_MemoryCounters))

    def read(kernel: Any, handle: Any) -> bool:
        return bool(kernel.K32GetProcessMemoryInfo(handle, ctypes.byref(counters), counters.size))

    return int(counters.private) if _ask_windows(pid, read, windows) else 0


def _ask_windows(pid: int, read: Any, windows: Any) -> bool:
    kernel = (windows or getattr(ctypes, "windll")).kernel32  # noqa: B009 - the attribute exists on Windows only
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(kernel.OpenProcess(_QUERY, False, pid))
    if not handle:
        return False
    try:
        return bool(read(kernel, handle))
    finally:
        kernel.CloseHandle(handle)
