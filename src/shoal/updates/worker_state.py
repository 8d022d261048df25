"""Checkpoint of a worker's own state: at the end of a round, and in the middle of one."""

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol

from torch import Tensor

from shoal.protocol.messages import SeatAssigned


class RoundStart(NamedTuple):
    """Where a round of a worker begins. Holds: two equal ones lead to the same numbers, step by step."""

    version: int
    """The version of the weights."""
    weights: int
    """The checksum of the weights; -1: a codec compresses them, so a worker that joins again gets slightly different ones."""
    place: SeatAssigned


class PartialRound(NamedTuple):
    """How far a worker is in a round, beside the state of its engine."""

    began: RoundStart
    place: SeatAssigned
    """Where the next batch comes from."""
    steps: int
    """Inner steps that were taken."""
    inner_steps: int
    """Inner steps of the whole round."""
    samples: int
    weight: int
    sums: dict[str, float]
    """The metrics of the steps so far, each times its weight."""

    @property
    def is_whole(self) -> bool:
        """Whether all inner steps were taken, so that only sending is left."""
        return self.steps >= self.inner_steps

    def was_taken(self, begins: RoundStart) -> bool:
        """Whether the coordinator has accepted the result: a worker that begins here only waits for the others, if at all."""
        return self.is_whole and self.place == begins.place and self.began.version <= begins.version


class WorkerCheckpoint(Protocol):
    """Saves a worker's state. `residual` is the part of the updates that the codec has not sent yet; restoring fills it."""

    @property
    def keeps_partial_rounds(self) -> bool:
        """Whether there is a place for the steps of a round that the worker leaves."""

    def save(self, version: int, residual: Tensor | None) -> None: ...
    def restore(self, version: int, residual: Tensor | None) -> None: ...
    def steps_until_save(self, step: int) -> int:
        """Steps from this one on until the partial round is to be saved."""

    def save_partial_round(self, partial: PartialRound, residual: Tensor | None) -> None: ...
    def find_partial_round(self, begins: RoundStart) -> PartialRound | None:
        """The saved part of the round that begins here, or the worker's last round, if that was finished; None: neither is there."""

    def resume_partial_round(self, residual: Tensor | None, within: bool) -> None:
        """Load the state of what `find_partial_round` returned. `within`: the worker continues that round, without new weights."""

    def delete_partial_round(self) -> None: ...


class NoWorkerCheckpoint:
    """For a worker that saves nothing."""

    keeps_partial_rounds = False

    def save(self, version: int, residual: Tensor | None) -> None: ...
    def restore(self, version: int, residual: Tensor | None) -> None: ...
    def save_partial_round(self, partial: PartialRound, residual: Tensor | None) -> None: ...
    def resume_partial_round(self, residual: Tensor | None, within: bool) -> None: ...
    def delete_partial_round(self) -> None: ...

    def steps_until_save(self, step: int) -> int:
        return sys.maxsize

    def find_partial_round(self, begins: RoundStart) -> PartialRound | None:
        return None
