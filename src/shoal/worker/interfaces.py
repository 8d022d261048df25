"""What the worker asks of what it works with: batches to learn from, and processes that step together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.tasks import Batch


class Feed(Protocol):
    """Batches without end, from a position that can be saved."""

    batches_per_epoch: int | None
    epoch: int

    @property
    def at_epoch_end(self) -> bool: ...
    def __next__(self) -> Batch: ...
    def close(self) -> None:
        """End what loads ahead."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StepResult(Protocol):
    """Figures of a step: sums are on the device until somebody reads them."""

    @property
    def metrics(self) -> dict[str, Tensor]: ...
    @property
    def weight(self) -> int: ...
    @property
    def samples(self) -> int: ...


class Writers(Protocol):
    """The processes that write a checkpoint together."""

    size: int
    talk: ProcessGroup | None
    apart: bool
    """Whether they share no folder: then the first one writes for all."""

    @property
    def first(self) -> bool: ...
    def broadcast_text(self, text: str) -> str:
        """The first process's text, in all of them."""
        ...

    def collected(self, own: bytes) -> Iterator[bytes]:
        """For the first process the bytes of the others, one after the other."""
        ...


class World(Writers, Protocol):
    """The processes that step together. One alone is a world, too."""

    rank: int
    leaving: bool
    """This process was asked to stop."""
    all_leave: bool
    """One of them was, and all know: after this step all stop."""

    def close(self) -> None: ...
    def total(self, figures: dict[str, Tensor]) -> dict[str, Tensor]: ...
    def each(self, own: Tensor) -> list[Tensor]:
        """Everybody's tensor, in the order of the ranks."""
        ...


class Window:
    """The mean of the figures since the last record, kept on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.weight = 0

    def add(self, result: StepResult) -> None:
        for name, value in result.metrics.items():
            scaled = value * result.weight
            self.sums[name] = self.sums[name] + scaled if name in self.sums else scaled
        self.weight += result.weight

    def take(self, world: World) -> dict[str, float]:
        """The means over all processes, from here on anew."""
        means = {name: float(value) / self.weight for name, value in world.total(self.sums).items()}
        self.sums, self.weight = {}, 0
        return means
