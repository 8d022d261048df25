"""Updates are flat vectors: pure functions on them, each with its state in the open."""

from shoal.updates.layout import FlatNetwork, Layout

__all__ = ["FlatNetwork", "Layout"]
