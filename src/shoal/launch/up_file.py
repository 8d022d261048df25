"""The process of `shoal up`: up.json in the run's folder, from `shoal up` until its end, so that `shoal down` finds it. It also says which
workers could not be started, once all machines were tried."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import ShoalError
from shoal.files import JsonFormat, make_folder
from shoal.launch.processes import start_time, still_runs
from shoal.launch.waiting import wait_until

_FILE = "up.json"
_FORMAT = JsonFormat("process file", 1, ("pid", "began"), private=True)
_POLL_INTERVAL_S = 0.1


@contextmanager
def written_while_up(folder: Path) -> Iterator[None]:
    """Note that this process keeps the run up, while it does."""
    make_folder(folder)
    path = folder / _FILE
    _FORMAT.write(path, {"pid": os.getpid(), "began": start_time(os.getpid()), "unfit": None})
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def note_started(folder: Path, unfit: Mapping[str, str]) -> None:
    """Note that all workers were tried. `unfit`: by name, why a worker could not be started."""
    if running_process(folder) == os.getpid():
        _FORMAT.write(folder / _FILE, {"pid": os.getpid(), "began": start_time(os.getpid()), "unfit": dict(unfit)})


def unfit_workers(folder: Path) -> dict[str, str] | None:
    """By name, why a worker could not be started; None while they are being started, or where nothing is up."""
    saved = _FORMAT.read(folder / _FILE)
    return saved.get("unfit") if saved and still_runs(saved["pid"], saved["began"]) else None


def running_process(folder: Path) -> int | None:
    """The process that keeps the run in a folder up; None where there is none. Raises ShoalError where up.json cannot be read."""
    saved = _FORMAT.read(folder / _FILE)
    return int(saved["pid"]) if saved and still_runs(saved["pid"], saved["began"]) else None


def take_down(folder: Path, patience_s: float) -> bool:
    """Ask it to save and end, and wait; whether it did so by itself. Raises ShoalError where nothing is up."""
    pid = running_process(folder)
    if pid is None:
        raise ShoalError(f"nothing is up in {folder}: `shoal up` starts a fleet, and a run that was completed has ended by itself")
    os.kill(pid, signal.SIGTERM)
    if wait_until(lambda: running_process(folder) is None, patience_s, _POLL_INTERVAL_S):
        return True
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # its workers leave when they notice that it is gone
    (folder / _FILE).unlink(missing_ok=True)
    return False
