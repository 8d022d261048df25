"""Whether this computer runs on battery. One without a battery is plugged in, and so is one that does not say."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from shoal.launch.volunteer.idle_time import Run
from shoal.launch.volunteer.system_programs import output_of

SUPPLIES = Path("/sys/class/power_supply")
_ON_BATTERY, _ON_MAINS = 0, 1


def on_battery() -> bool:
    if sys.platform == "darwin":
        return macos_on_battery()
    return windows_on_battery() if sys.platform == "win32" else linux_on_battery()


def linux_on_battery(supplies: Path = SUPPLIES) -> bool:
    """By the kernel's list of supplies. Batteries of devices such as a mouse do not count."""
    kinds: dict[str, list[Path]] = {}
    for supply in supplies.iterdir() if supplies.is_dir() else ():
        if _read(supply / "scope") != "Device":
            kinds.setdefault("Battery" if _read(supply / "type") == "Battery" else "Mains", []).append(supply)
    mains = [_read(supply / "online") for supply in kinds.get("Mains", ())]
    if "Battery" not in kinds or "1" in mains:
        return False
    return "0" in mains or any(_read(battery / "status") == "Discharging" for battery in kinds["Battery"])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def macos_on_battery(run: Run = output_of) -> bool:
    """By the first line of `pmset -g batt`: Now drawing from 'Battery Power'."""
    return "'Battery Power'" in (run(["pmset", "-g", "batt"]) or "").partition("\n")[0]


class _PowerStatus(ctypes.Structure):
    _fields_ = (
        ("mains", ctypes.c_ubyte),
        ("battery", ctypes.c_ubyte),
        ("percent", ctypes.c_ubyte),
        ("saver", ctypes.c_ubyte),
        ("left_s", ctypes.c_uint32),
        ("full_s", ctypes.c_uint32),
    )


def windows_on_battery(windows: Any = None) -> bool:
    """By GetSystemPowerStatus; 255 means that it does not know."""
    windows = windows or getattr(ctypes, "windll", None)
    status = _PowerStatus(mains=_ON_MAINS)
    return bool(windows is not None and windows.kernel32.GetSystemPowerStatus(ctypes.byref(status)) and status.mains == _ON_BATTERY)
