"""What the environment says beside a configuration."""

from __future__ import annotations

import os
from pathlib import Path


def database_password() -> str | None:
    """The password for an address that has none."""
    return os.environ.get("DB_PASSWORD") or None


def join_token() -> str | None:
    """The token for joining, where the command line does not name it."""
    return os.environ.get("SHOAL_TOKEN") or None


def coordinator_secrets() -> tuple[str, str] | None:
    """The token and the secret key of a coordinator that begins, where whoever started it has made them already."""
    token, secret = os.environ.get("SHOAL_TOKEN"), os.environ.get("SHOAL_SECRET_KEY")
    return (token, secret) if token and secret else None


def state_folder() -> Path:
    """Where programs of this user keep what they need to go on after a break (the XDG base directories say so)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shoal"
