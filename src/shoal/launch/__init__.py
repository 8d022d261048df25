"""Starting processes: workers on this machine."""

from shoal.launch.local import LocalWorkers

__all__ = ["LocalWorkers"]
