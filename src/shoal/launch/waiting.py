"""Waits for conditions and for processes, for a limited time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.launch.forkserver import ChildProcess


def wait_until(holds: Callable[[], bool], seconds: float, every_s: float) -> bool:
    """Check a condition repeatedly until it holds or the time is up; whether it holds."""
    until = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(every_s)
    return held


def wait_or_kill(process: ChildProcess | subprocess.Popen[Any], seconds: float) -> None:
    """Wait for a process to end, and kill it where it takes too long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
