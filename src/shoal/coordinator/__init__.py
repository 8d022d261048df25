"""The coordinator: a pure state machine that turns what workers send into new weights, and what makes it durable."""

from shoal.coordinator.machine import Coordinator
from shoal.coordinator.policies import Barrier, Every, Inner, Policy, Quorum

__all__ = ["Barrier", "Coordinator", "Every", "Inner", "Policy", "Quorum"]
