"""Inside a worker: how batches become an update on its own devices."""

from shoal.engines.single import SingleEngine, StepResult

__all__ = ["SingleEngine", "StepResult"]
