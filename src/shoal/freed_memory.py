"""Gives memory that was freed back to the system. The C library keeps it for later requests, of which large ones may not fit into it."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Call between phases that need much memory. Only glibc, which Linux has, offers this."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
