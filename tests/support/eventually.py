"""`eventually`: waits for what other threads or processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 600
"""What takes longer hangs. This measures nothing: a busy machine takes many times as long as a quiet one."""
_LOOK_EVERY_S = 0.01


def eventually(condition: Callable[[], object], expected: str = "it never came true", timeout_s: float = HANG_S) -> None:
    """Wait until a condition holds. `expected` is the message where it does not hold in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, expected
        time.sleep(_LOOK_EVERY_S)
