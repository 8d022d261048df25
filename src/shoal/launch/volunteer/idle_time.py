"""How long ago a person used keyboard or mouse, as each system reports it.

| system | source |
|---|---|
| Linux, X11 | the X server's screen saver extension |
| Linux, Wayland | Mutter (GNOME), else org.freedesktop.ScreenSaver (KDE), over the session bus |
| Linux, else | logind's IdleHint and IdleSinceHint of all sessions; terminals count, too |
| macOS | HIDIdleTime of `ioreg` |
| Windows | GetLastInputInfo |
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shoal.launch.volunteer.system_programs import output_of

Run = Callable[[list[str]], str | None]
"""Runs a program of the system and returns what it printed."""
IdleSource = Callable[[], float]


def idle_source() -> IdleSource | None:
    """A function that returns the seconds since the last input; None where nothing reports them."""
    if sys.platform == "darwin":
        found: list[Callable[[], float | None]] = [macos_idle_s]
    elif sys.platform == "win32":
        found = [windows_idle_s]
    else:
        found = _linux_sources()
    source = next((one for one in found if one() is not None), None)
    # A source that falls silent later counts as use: a display that ends, ends with its user's session
    return None if source is None else lambda: source() or 0.0


def _linux_sources() -> list[Callable[[], float | None]]:
    if os.environ.get("WAYLAND_DISPLAY"):  # the X server of a Wayland session sees the input of X programs only
        return [mutter_idle_s, screen_saver_idle_s, logind_idle_s]
    if os.environ.get("DISPLAY"):
        with suppress(OSError, AttributeError):
            return [XScreenSaver(os.environ["DISPLAY"]).idle_s, logind_idle_s]
    return [logind_idle_s]


def logind_idle_s(run: Run = output_of, now: Callable[[], float] = time.time) -> float | None:
    """By the hint of logind, which is `yes` when all sessions are idle."""
    said = run(["loginctl", "show-session", "-p", "IdleHint", "-p", "IdleSinceHint"])
    found = dict(line.split("=", 1) for line in (said or "").splitlines() if "=" in line)
    if found.get("IdleHint") == "no":
        return 0.0
    since = found.get("IdleSinceHint", "")
    if found.get("IdleHint") != "yes" or not since.isdigit():
        return None
    return max(0.0, now() - int(since) / 1e6)


def mutter_idle_s(run: Run = output_of) -> float | None:
    """By GNOME's compositor, in milliseconds."""
    name = "org.gnome.Mutter.IdleMonitor"
    said = run(["busctl", "--user", "call", name, "/org/gnome/Mutter/IdleMonitor/Core", name, "GetIdletime"])
    found = re.fullmatch(r"t (\d+)\s*", said or "")
    return int(found[1]) / 1000 if found else None


def screen_saver_idle_s(run: Run = output_of) -> float | None:
    """By KDE's screen saver service, in milliseconds."""
    name = "org.freedesktop.ScreenSaver"
    said = run(["busctl", "--user", "call", name, "/ScreenSaver", name, "GetSessionIdleTime"])
    found = re.fullmatch(r"u (\d+)\s*", said or "")
    return int(found[1]) / 1000 if found else None


class _ScreenSaverInfo(ctypes.Structure):
    _fields_ = (
        ("window", ctypes.c_ulong),
        ("state", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("til_or_since", ctypes.c_ulong),
        ("idle", ctypes.c_ulong),
        ("event_mask", ctypes.c_ulong),
    )


class XScreenSaver:
    """A connection to an X server that has the screen saver extension."""

    def __init__(self, display: str) -> None:
        """Raises OSError where libX11 or libXss is missing, or no server answers."""
        self._x11, self._xss = _library("X11"), _library("Xss")
        self._x11.XOpenDisplay.restype = self._x11.XDefaultRootWindow.restype = ctypes.c_void_p
        self._xss.XScreenSaverAllocInfo.restype = ctypes.POINTER(_ScreenSaverInfo)
        opened = self._x11.XOpenDisplay(display.encode())
        if not opened:
            raise OSError(f"no X server answers at {display}")
        self._display = ctypes.c_void_p(opened)
        self._root = ctypes.c_void_p(self._x11.XDefaultRootWindow(self._display))
        self._info = self._xss.XScreenSaverAllocInfo()

    def idle_s(self) -> float | None:
        if not self._xss.XScreenSaverQueryInfo(self._display, self._root, self._info):
            return None
        return float(self._info.contents.idle) / 1000


def _library(name: str) -> Any:
    """A shared library. Raises OSError."""
    path = ctypes.util.find_library(name)
    if path is None:
        raise OSError(f"lib{name} is not here")
    return ctypes.CDLL(path)


def macos_idle_s(run: Run = output_of) -> float | None:
    """By the driver of input devices, in nanoseconds."""
    found = re.search(r'"HIDIdleTime" = (\d+)', run(["ioreg", "-c", "IOHIDSystem", "-d", "4"]) or "")
    return int(found[1]) / 1e9 if found else None


class _LastInput(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint32), ("time", ctypes.c_uint32))


def windows_idle_s(windows: Any = None) -> float | None:
    """By the tick of the last input, in milliseconds since the computer started; both counters wrap around after 49 days."""
    windows = windows or getattr(ctypes, "windll", None)
    if windows is None:
        return None
    last = _LastInput(ctypes.sizeof(_LastInput), 0)
    if not windows.user32.GetLastInputInfo(ctypes.byref(last)):
        return None
    return ((windows.kernel32.GetTickCount() - last.time) & 0xFFFFFFFF) / 1000
