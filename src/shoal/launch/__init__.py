"""Starting processes on this machine: workers, and the ranks of an engine."""

from shoal.launch.local import LocalWorkers
from shoal.launch.ranks import LOST, LocalRanks

__all__ = ["LOST", "LocalRanks", "LocalWorkers"]
