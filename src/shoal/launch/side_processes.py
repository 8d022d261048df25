"""Processes beside a run that end with it: the dashboard, and the announcer. Viewers and strangers do not slow the coordinator there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from shoal.errors import ShoalError
from shoal.launch.processes import ENDS_WITH_PARENT
from shoal.launch.waiting import wait_or_kill
from shoal.transports.discovery import Announcement

_PARTING_S = 5.0
_ANNOUNCING_S = 60.0
"""Time limit for the announcer to begin; the network's other names are asked for meanwhile."""
_ANNOUNCER = "shoal.transports.discovery"
_NO_SECRETS = {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "LC_ALL"}
"""Environment variables that the announcer gets: none holds a secret."""


def check_dashboard() -> None:
    """Raises ShoalError where no dashboard can be shown."""
    missing = [name for name in ("fastapi", "segno", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ShoalError(f"the dashboard needs {' and '.join(missing)}: pip install 'shoal[serve]'")


@contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    """Serve a run's folder to browsers. Yields the sentence that says where."""
    command = [sys.executable, "-m", ENDS_WITH_PARENT, "watch", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip() or "warning: the dashboard did not start"
    finally:
        process.terminate()
        wait_or_kill(process, _PARTING_S)


@contextmanager
def announced(announcement: Announcement, tell: Callable[[str], None]) -> Iterator[None]:
    """Announce a server on this machine's networks. Raises ShoalError where that is impossible; `tell` gets a warning if it ends early."""
    environ = {name: value for name, value in os.environ.items() if name in _NO_SECRETS}
    command = [sys.executable, "-m", _ANNOUNCER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True)
    closing = threading.Event()

    def report_end() -> None:
        process.wait()
        if not closing.is_set():
            tell("warning: the process that announces this server on the network has ended: from now on `shoal join` needs the address")

    watch = threading.Thread(target=report_end, name="announcer", daemon=True)
    try:
        _begin(process, announcement)
        watch.start()
        yield
    finally:
        closing.set()
        if process.stdin is not None:
            process.stdin.close()  # it takes its announcement back, and ends
        wait_or_kill(process, _PARTING_S)


def _begin(process: subprocess.Popen[str], announcement: Announcement) -> None:
    """Send the announcement to the process, and wait until it is announced. A process that does not answer is killed. Raises ShoalError."""
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Timer(_ANNOUNCING_S, process.kill)
    late.start()
    try:
        process.stdin.write(json.dumps(announcement._asdict()) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:
        answer = ""
    finally:
        late.cancel()
    silent = f"the process that announces it ended at once, or said nothing for {_ANNOUNCING_S:.0f} s; start without --announce"
    error = json.loads(answer)["error"] if answer else silent
    if error:
        raise ShoalError(f"--announce: {error}")
