"""Environment variables that are not settings, and the cores of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def database_password() -> str | None:
    """Password for a database address without one."""
    return os.environ.get("DB_PASSWORD") or None


def join_token() -> str | None:
    """Join token, if the command line has none."""
    return os.environ.get("SHOAL_TOKEN") or None


def hub_token() -> str | None:
    """This user's token for the Hugging Face hub."""
    return os.environ.get("HF_TOKEN") or None


def coordinator_secrets() -> tuple[str, str] | None:
    """Join token and secret key of a new coordinator, if the process that started it has created them."""
    token, secret = os.environ.get("SHOAL_TOKEN"), os.environ.get("SHOAL_SECRET_KEY")
    return (token, secret) if token and secret else None


def state_folder() -> Path:
    """Shoal's folder in the user's XDG state directory."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shoal"


def usable_cores() -> int:
    """Cores that this process may use, by its CPU affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
