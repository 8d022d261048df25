"""The worker: the loop that feeds an engine, and what a run leaves on disk."""

from shoal.worker.checkpoint import Checkpoints
from shoal.worker.loop import Loop, Reporter
from shoal.worker.run_directory import RunDirectory

__all__ = ["Checkpoints", "Loop", "Reporter", "RunDirectory"]
