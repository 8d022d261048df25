"""`eventually`: waits for what other threads or processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 600
"""What takes longer hangs. This measures nothing: a busy machine takes many times as long as a quiet one."""
_LOOK_EVERY_S = 0.01


def eventually(condition: Callable[[], object], expected: str = "it never came true", timeout_s: float = HANG_S) -> None:
    """Wait until a condition holds. `expected` is the message where it does not hold in time. Looking takes a third of the time at most:
    what is waited for needs the processor, too."""
    deadline = time.monotonic() + timeout_s
    began = time.thread_time()
    while not condition():
        assert time.monotonic() < deadline, expected
        time.sleep(max(_LOOK_EVERY_S, 2 * (time.thread_time() - began)))
        began = time.thread_time()
