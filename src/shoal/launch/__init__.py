"""Starting processes: workers on this machine."""

from shoal.launch.local import LocalWorkers, wait_quietly

__all__ = ["LocalWorkers", "wait_quietly"]
