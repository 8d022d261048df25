"""`python -m shoal.cli.ends_with_parent COMMAND …`: runs a command that saves and ends when its standard input closes.

The parent process holds the other end of the pipe, so the command does not outlive it.
"""

from __future__ import annotations

import os
import signal
import threading

from shoal.cli.main import program

_MOST_BYTES = 4096


def _follow() -> None:
    while os.read(0, _MOST_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_follow, name="leash", daemon=True).start()
    program()
