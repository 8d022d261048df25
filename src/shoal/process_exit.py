"""The end of a process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter does, but for its memory: threads are waited for, what asked to be called at the end is called,
    what was printed is written. To take torch apart in memory, object by object, would take a second of a core; the system frees it at
    once. Files and sockets have been closed by those who opened them. A profiler or a debugger sees the whole end."""
    if sys.getprofile() is not None or sys.gettrace() is not None:
        raise SystemExit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError, AttributeError):  # nobody reads it any more, or it was closed, or there is none
            pass
        except OSError as error:  # the disk is full
            with suppress(OSError):
                os.write(2, f"error: not all that was printed could be written: {error.strerror}\n".encode())
            code = code or 1
    os._exit(code)
