"""The coordinator: a pure state machine that turns contributions into new weights, its driver, and its durable state."""

from shoal.coordinator.machine import Coordinator
from shoal.coordinator.round_policies import Barrier, Bounded, Discounted, Every, Everything, UnitQuorum

__all__ = ["Barrier", "Bounded", "Coordinator", "Discounted", "Every", "Everything", "UnitQuorum"]
