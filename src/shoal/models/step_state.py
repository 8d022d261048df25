"""Buffers that are updated once per step from the statistics of all processes, such as router biases; neither trained nor averaged.

They are the same in all processes of an engine, and are saved with the weights. In a run of many workers the coordinator holds this state:
a worker reports how far its steps would move it, and the coordinator applies the mean of the reports of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn


class StepState(nn.Module):
    """A module with per-step state. The engine calls it when a step begins and ends."""

    total: Callable[[Tensor], Tensor] = staticmethod(lambda values: values)
    """All-reduce (sum) over the processes; the engine sets it."""
    rank: int = 0
    ranks: int = 1
    """Rank of this process and number of processes; the engine sets them."""
    counting: bool = True
    """Whether the next batch counts. False in a process that gets no samples of a small batch and computes a dummy one."""

    def begin_step(self) -> None:
        """Reset the statistics of the step."""

    def end_step(self) -> None:
        """Compute the movement of the state from the statistics of all processes."""

    def move(self) -> None:
        """Apply the movement that `end_step` computed."""

    def figures(self) -> dict[str, Tensor]:
        """Scalars to record for the step that has ended, the same in all processes."""
        return {}

    def details(self) -> dict[str, Tensor]:
        """Further scalars of that step, too many to send between machines."""
        return {}

    def state(self) -> list[Tensor]:
        """The tensors that the coordinator sends to workers."""
        return []

    def take_movement(self) -> list[Tensor]:
        """The movement of each state tensor over the steps since the last call."""
        return []

    def pending(self) -> list[Tensor]:
        """The movement accumulated since the last `take_movement`, for a checkpoint."""
        return []

    def load_pending(self, values: list[Tensor]) -> None:
        """Restore what `pending` returned."""

    def share_movement(self, mean: Callable[[Tensor], Tensor]) -> None:
        """Average the accumulated movement of processes that step independently. `mean` is over all of them."""

    def merge_layers(self, part: StepState, total: Callable[[Tensor], Tensor]) -> None:
        """Add the statistics of `part`, a stage, and sum over all stages with `total`."""

    def on_state_loaded(self) -> None:
        """Called after the coordinator's state was copied into `state()`."""

    def apply_movement(self, movement: list[Tensor]) -> None:
        """Apply the movement that workers reported. Holds: whatever they report, the state stays within its bounds."""


def step_states(module: nn.Module) -> Iterator[StepState]:
    yield from (one for one in module.modules() if isinstance(one, StepState))
