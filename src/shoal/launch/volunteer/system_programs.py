"""What small programs of the system print."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

_LONGEST_S = 5.0


def output_of(command: Sequence[str]) -> str | None:
    """The standard output of a program; None if it is not here, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_LONGEST_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
