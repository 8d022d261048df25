"""Ends a process without tearing down torch."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Exit like the interpreter, without freeing memory object by object, which takes a second with torch.

    Waits for threads, runs atexit functions and flushes output. Files and sockets must be closed already. Under a profiler or debugger
    the normal exit is used."""
    if sys.getprofile() is not None or sys.gettrace() is not None:
        raise SystemExit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError, AttributeError):  # a closed pipe, a closed stream, or none
            pass
        except OSError as error:  # the disk is full
            with suppress(OSError):
                os.write(2, f"error: not all that was printed could be written: {error.strerror}\n".encode())
            code = code or 1
    os._exit(code)
