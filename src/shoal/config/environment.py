"""What the environment says beside a configuration."""

from __future__ import annotations

import os
from pathlib import Path


def database_password() -> str | None:
    """The password for an address that has none."""
    return os.environ.get("DB_PASSWORD") or None


def state_folder() -> Path:
    """Where programs of this user keep what they need to go on after a break (the XDG base directories say so)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shoal"
