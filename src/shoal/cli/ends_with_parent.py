"""`python -m shoal.cli.ends_with_parent COMMAND …`: runs a command that saves and ends when its standard input closes.

The parent process holds the other end of the pipe, so the command does not outlive it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from shoal.cli.main import program

_MOST_BYTES = 4096


def when_parent_ends(action: Callable[[], object]) -> None:
    """Call `action` from a thread once standard input closes."""

    def watch() -> None:
        while os.read(0, _MOST_BYTES):
            pass
        action()

    threading.Thread(target=watch, name="standard-input", daemon=True).start()


if __name__ == "__main__":
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    program()
