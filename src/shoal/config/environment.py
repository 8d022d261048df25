"""Environment variables that are not settings, and the cores and the memory of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def database_password() -> str | None:
    """Password for a database address without one."""
    return os.environ.get("DB_PASSWORD") or None


def join_token() -> str | None:
    """Join token, if the command line has none."""
    return os.environ.get("SHOAL_TOKEN") or None


def hub_token() -> str | None:
    """This user's token for the Hugging Face hub: of the environment, or of `hf auth login`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    file = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")
    try:
        return os.environ.get("HF_TOKEN") or file.expanduser().read_text(encoding="utf-8").strip() or None
    except (OSError, RuntimeError, UnicodeError):
        return None


def keep_hub_token_back() -> None:
    """Let the hub's libraries send this user's token only where Shoal passes it: for names that the user allowed."""
    os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:  # it has read the variable already
        constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = True  # type: ignore[attr-defined]


def coordinator_secrets() -> tuple[str, str] | None:
    """Join token and secret key of a new coordinator, if the process that started it has created them."""
    token, secret = os.environ.get("SHOAL_TOKEN"), os.environ.get("SHOAL_SECRET_KEY")
    return (token, secret) if token and secret else None


def free_memory() -> int | None:
    """Free bytes of this machine's memory; None where the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):  # not Linux: all memory, where the system reports that
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


def has_screen() -> bool:
    """Whether a desktop of Linux shows what this process shows."""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def with_variables(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that is told something in these variables."""
    return {**os.environ, **more}


def state_folder() -> Path:
    """Shoal's folder in the user's XDG state directory."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shoal"


def usable_cores() -> int:
    """Cores that this process may use, by its CPU affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
