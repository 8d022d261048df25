"""plugins.json in a run's folder: names and digests of the plugins that the run uses."""

from __future__ import annotations

from pathlib import Path

from shoal.config import Run
from shoal.config.plugins import needed_by, require_same
from shoal.files import JsonFormat

FILE = "plugins.json"
_FORMAT = JsonFormat("plugin record", 1, ("plugins",))


def write(folder: Path, run: Run) -> None:
    """Write the file, if the run uses a plugin."""
    if needed := needed_by(run):
        _FORMAT.write(folder / FILE, {"plugins": needed}, indent=2)


def expect_those_of(folder: Path) -> None:
    """Raises ShoalError where a plugin of the run in this folder is missing or has changed."""
    needed = (_FORMAT.read(folder / FILE) or {"plugins": {}})["plugins"]
    require_same({str(name): str(digest) for name, digest in needed.items()}, f"the run in {folder}")
