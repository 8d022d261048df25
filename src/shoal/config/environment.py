"""What the environment says beside a configuration."""

from __future__ import annotations

import os


def database_password() -> str | None:
    """The password for an address that has none."""
    return os.environ.get("DB_PASSWORD") or None
