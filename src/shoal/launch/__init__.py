"""Starting processes: workers on this machine, and the run's own database."""

from shoal.launch.local import LocalWorkers
from shoal.launch.postgres import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "LocalWorkers"]
