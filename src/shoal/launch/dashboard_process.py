"""Runs the dashboard of a run in its own process, so that viewers do not slow the coordinator. It ends with the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from shoal.errors import ShoalError
from shoal.launch.processes import ENDS_WITH_PARENT
from shoal.launch.waiting import wait_or_kill

_PARTING_S = 5.0


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
