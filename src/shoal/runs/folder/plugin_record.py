"""plugins.json in a run's folder: names and digests of the plugins that the run uses."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.config import Run
from shoal.config.plugins import needed_by, require_same
from shoal.errors import ShoalError

FILE = "plugins.json"


def record_of(run: Run) -> str:
    """The content of the file; empty where the run uses no plugin."""
    needed = needed_by(run)
    return json.dumps(needed, indent=2) + "\n" if needed else ""


def expect_those_of(folder: Path) -> None:
    """Raises ShoalError where a plugin of the run in this folder is missing or has changed."""
    try:
        needed = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ShoalError(f"{folder / FILE} cannot be read: {error}") from None
    require_same({str(name): str(digest) for name, digest in needed.items()}, f"the run in {folder}")
