"""Workers on other machines, started from here: by ssh, or by a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import Run
from shoal.launch.ssh_workers import SshWorkers
from shoal.runs.invitation import Invitation

if TYPE_CHECKING:
    from shoal.launch.ray_workers import RayWorkers


def launcher(
    run: Run, folder: Path, invitation: Invitation, workers: Mapping[str, Sequence[str]], notify: Callable[[str], None]
) -> SshWorkers | RayWorkers:
    """The workers of a run, not started yet. Raises ShoalError where what starts them is not installed."""
    if run.launch.kind == "ray":
        from shoal.launch.ray_workers import RayWorkers

        return RayWorkers(run, folder, invitation, workers, notify)
    return SshWorkers(run, folder, invitation, workers, notify)
