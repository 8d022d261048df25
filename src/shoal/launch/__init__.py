"""Starting processes: workers on this machine, and the run's own database."""

from shoal.launch.local import LocalWorkers, wait_quietly
from shoal.launch.postgres import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "LocalWorkers", "wait_quietly"]
