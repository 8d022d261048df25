"""Every setting there is, with its type, its limits and its default. Nothing here imports anything heavy."""

from shoal.config.schema.run import Run

__all__ = ["Run"]
