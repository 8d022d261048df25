"""What a worker keeps of itself, to go on after a break: at the end of a round, and in the middle of one."""

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol

from torch import Tensor

from shoal.worker.session import SeatAssigned


class RoundStart(NamedTuple):
    """Where a round of a worker begins. Two that are equal lead to the same numbers, step by step."""

    version: int
    """The weights that it begins with."""
    weights: int
    """The checksum of those weights; -1: a codec shortens them, so whoever comes back gets slightly different ones."""
    place: SeatAssigned


class PartialRound(NamedTuple):
    """How far a worker is in a round, beside what its engine knows."""

    began: RoundStart
    place: SeatAssigned
    """Where the next batch comes from."""
    steps: int
    asked_steps: int
    samples: int
    weight: int
    sums: dict[str, float]
    """The figures of the steps so far, times their weight."""

    @property
    def is_whole(self) -> bool:
        """Whether the worker has taken all of its steps, and what they led to is all that is left to send."""
        return self.steps >= self.asked_steps

    def was_taken(self, begins: RoundStart) -> bool:
        """Whether the coordinator has what came of it: a worker that begins here has only to wait for the others, if at all."""
        return self.is_whole and self.place == begins.place and self.began.version <= begins.version


class WorkerCheckpoint(Protocol):
    """Keeps a worker's state. `residual` is what its codec has not sent yet; restoring fills it."""

    def save(self, version: int, residual: Tensor | None) -> None: ...
    def restore(self, version: int, residual: Tensor | None) -> None: ...
    def until_half(self, step: int) -> int:
        """Steps from this one on until half a round is to be kept."""
        ...

    def save_half(self, half: PartialRound, residual: Tensor | None) -> None: ...
    def half_round(self, begins: RoundStart) -> PartialRound | None:
        """What is kept of the round that begins here, or of the worker's last one, which it had finished; None: nothing of use."""
        ...

    def resume_half(self, residual: Tensor | None, within: bool) -> None:
        """Become what the worker was when it kept what `half_round` gave. `within`: it goes on in that very round, not with new weights."""
        ...

    def forget_half(self) -> None: ...


class NoWorkerCheckpoint:
    """For a worker that need not go on after a break."""

    def save(self, version: int, residual: Tensor | None) -> None: ...
    def restore(self, version: int, residual: Tensor | None) -> None: ...
    def save_half(self, half: PartialRound, residual: Tensor | None) -> None: ...
    def resume_half(self, residual: Tensor | None, within: bool) -> None: ...
    def forget_half(self) -> None: ...

    def until_half(self, step: int) -> int:
        return sys.maxsize

    def half_round(self, begins: RoundStart) -> PartialRound | None:
        return None
