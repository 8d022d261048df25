"""Ends a process quickly, without freeing its memory object by object."""

from __future__ import annotations

import atexit
import os
import select
import sys
import threading
from contextlib import suppress
from typing import NoReturn

DECLINED = 3
"""Exit code of a machine whose user did not agree to what a run asks of it."""
PAUSED = 4
"""Exit code of a worker that left because the user of its computer needs it."""
RUN_STOPPED = 5
"""Exit code of a watched worker whose run was stopped by its owner, and may go on later."""


def reader_is_gone() -> bool:
    """Whether what this process prints has no reader any more, as after `shoal … | head`."""
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except BrokenPipeError:
        return True
    except (OSError, ValueError, AttributeError):  # it is closed or missing, or the system has no `poll`
        return False
    return bool(poll.poll(0))


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter does, except that objects are not destroyed: that takes a second of a core for torch, and the
    system frees the memory at once. Threads are joined, exit functions are called, and output is flushed. Under a profiler or debugger
    the interpreter ends normally."""
    if sys.getprofile() is not None or sys.gettrace() is not None:
        raise SystemExit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError, AttributeError):  # the reader is gone, or the stream is closed or missing
            pass
        except OSError as error:  # the disk is full
            with suppress(OSError):
                os.write(2, f"error: not all that was printed could be written: {error.strerror}\n".encode())
            code = code or 1
    os._exit(code)
