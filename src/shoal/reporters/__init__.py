"""Watching a run: progress, metrics sinks, loss curves, tables of runs."""
