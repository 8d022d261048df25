"""`python -m shoal.cli.ends_with_parent COMMAND …`: a command that saves and ends when its standard input does.

Whoever starts it holds the other end of a pipe, so it does not outlive that process, however that process ends.
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
