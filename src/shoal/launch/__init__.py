"""Starting processes on this machine: workers, the ranks of an engine, and the run's own database."""

from shoal.launch.local import LocalWorkers, wait_quietly
from shoal.launch.postgres import EmbeddedPostgres
from shoal.launch.ranks import LOST, LocalRanks

__all__ = ["LOST", "EmbeddedPostgres", "LocalRanks", "LocalWorkers", "wait_quietly"]
