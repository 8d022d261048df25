"""Inside a worker: how batches become an update on its own devices."""

from shoal.engines.base import Engine, StepResult
from shoal.engines.build import build
from shoal.engines.single import SingleEngine, choose_device
from shoal.engines.world import Meeting, World, enter

__all__ = ["Engine", "Meeting", "SingleEngine", "StepResult", "World", "build", "choose_device", "enter"]
