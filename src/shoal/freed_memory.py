"""Gives memory that was freed back to the system. The C library keeps it for later requests, of which large ones may not fit into it."""

from __future__ import annotations

import ctypes
import sys

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""
_LARGE = 2 << 20


def return_freed_memory() -> None:
    """Call between phases that need much memory. Only glibc, which Linux has, offers this."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def return_large_blocks() -> None:
    """From now on blocks of 2 MB or more are returned when they are freed. The C library otherwise raises that size to 32 MB, and servers
    that load and drop matrices grow by what lies between them."""
    if sys.platform == "linux" and (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(_MMAP_THRESHOLD, _LARGE)
