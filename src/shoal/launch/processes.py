"""Processes of this machine: when one began, whether it still runs, and how one ends with its parent."""

from __future__ import annotations

import calendar
import os
import subprocess
import time
from importlib import import_module

ENDS_WITH_PARENT = "shoal.cli.ends_with_parent"
"""Runs a command that ends with this process, however this process ends: it holds the other end of the command's standard input."""
_TOLERANCE_S = 2.0
"""`ps` gives whole seconds, and an adjusted clock moves the time a little."""


def start_time(pid: int) -> float | None:
    """When a process began, in seconds since 1970; None: there is no such process, or it has ended and its parent does not know yet."""
    try:
        psutil = import_module("psutil")
    except ImportError:
        return _start_time_by_ps(pid)
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None


def _start_time_by_ps(pid: int) -> float | None:
    command = ["ps", "-o", "lstart=", "-o", "stat=", "-p", str(pid)]
    environ = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    words = subprocess.run(command, capture_output=True, text=True, check=False, env=environ).stdout.split()
    if not words or words[-1].startswith("Z"):
        return None
    return float(calendar.timegm(time.strptime(" ".join(words[:-1]), "%a %b %d %H:%M:%S %Y")))


def still_runs(pid: int, began: float | None) -> bool:
    """Whether the process of this number that began then still runs. A later process with the same number is another one."""
    now = None if began is None else start_time(pid)
    return began is not None and now is not None and abs(now - began) < _TOLERANCE_S
