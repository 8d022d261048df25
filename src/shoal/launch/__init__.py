"""Starting processes on this machine: workers, the ranks of an engine, and the run's own database."""
