"""The coordinator: a pure state machine that turns what workers send into new weights, and what makes it durable."""

from shoal.coordinator.machine import Coordinator
from shoal.coordinator.round_policies import Barrier, Bounded, Discounted, Every, Everything, UnitQuorum

__all__ = ["Barrier", "Bounded", "Coordinator", "Discounted", "Every", "Everything", "UnitQuorum"]
