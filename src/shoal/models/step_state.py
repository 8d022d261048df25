"""State of a third kind: buffers that are neither trained nor averaged. They follow from what all processes of an engine saw in a step, so
they are the same in all of them, and they are saved with the weights.

Among many workers the coordinator holds such state. A worker reports how far it would move it, and the coordinator moves it by the mean
of what the workers of a round report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn


class StepState(nn.Module):
    """A module with such state. An engine tells it when a step begins and ends."""

    total: Callable[[Tensor], Tensor] = staticmethod(lambda values: values)
    """Adds a tensor up over all processes; the engine sets it."""
    rank: int = 0
    ranks: int = 1
    """The number of this process, and how many there are; the engine sets them."""
    counting: bool = True
    """Whether the batch that comes counts: a process without a share of a small batch computes one that does not."""

    def begin_step(self) -> None:
        """Forget what was seen in the step before."""

    def end_step(self) -> None:
        """Decide how far the state moves, from what all processes saw in this step."""

    def move(self) -> None:
        """Move the state as far as the step decided, once."""

    def figures(self) -> dict[str, Tensor]:
        """Single numbers to record of the step that has ended, the same in all processes."""
        return {}

    def details(self) -> dict[str, Tensor]:
        """Further numbers of that step, too many to travel between machines."""
        return {}

    def state(self) -> list[Tensor]:
        """The state itself, which the coordinator hands out."""
        return []

    def take_movement(self) -> list[Tensor]:
        """How far the steps since the last call would have moved each of them."""
        return []

    def gathered(self) -> list[Tensor]:
        """What `take_movement` would go by now."""
        return []

    def load_gathered(self, values: list[Tensor]) -> None:
        """Take over what `gathered` gave, before a break."""

    def share_movement(self, mean: Callable[[Tensor], Tensor]) -> None:
        """Processes that step by themselves agree on how far their steps would move it: `mean` is over all of them."""

    def take_over(self, part: StepState, first: int, total: Callable[[Tensor], Tensor]) -> None:
        """Where each process has other layers: take over what `part` saw in the layers from number `first` on, and the `total` of all
        processes' parts. Then this is what was seen in all layers."""

    def hear(self) -> None:
        """The coordinator's state is here."""

    def follow(self, movement: list[Tensor]) -> None:
        """Move the state as workers report. What they report is a claim: it must not lead out of the state's bounds."""


def step_states(module: nn.Module) -> Iterator[StepState]:
    yield from (one for one in module.modules() if isinstance(one, StepState))
