"""What only a worker knows, and a run that goes on needs: its optimizer, its random numbers, what its codec still owes.

A folder of the worker's own, with a checkpoint for each of the coordinator's, and in `half-round` the newest from the middle of a round.
Who comes back without it starts its optimizer over. Of a worker of several processes all save, and all restore.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.runs.folder.checkpoint import Checkpoint, Checkpoints, read_checkpoint
from shoal.worker.session import SeatAssigned
from shoal.worker.worker_state import PartialRound, RoundStart

HALF = "half-round"


class Kept(Protocol):
    """The engine of a worker that takes steps of its own."""

    device: torch.device

    @property
    def world(self) -> World: ...
    def weights(self) -> dict[str, Tensor]: ...
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def gathered(self) -> dict[str, Any]: ...
    def load_gathered(self, state: dict[str, Any]) -> None: ...

    step_count: int


class SaveSchedule(NamedTuple):
    """When a worker keeps its state."""

    rounds: Callable[[int], bool]
    """With which versions of the weights in hand."""
    every_steps: int | None
    """In the middle of rounds: after every so many steps; None: never."""
    shape: str
    """The digest of the settings that shape a worker's numbers: with others nobody goes on in the middle of a round."""


class WorkerCheckpoints:
    """One worker's, in `folder`; those of a run that this one continues, in `earlier`."""

    def __init__(
        self,
        engine: Kept,
        folder: Path | None,
        earlier: Path | None,
        occasions: SaveSchedule,
        keep_last: int,
        tell: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.own = Checkpoints(folder, keep_last) if folder is not None else None
        self.halves = Checkpoints(folder / HALF, 1) if folder is not None else None
        self.places = [Checkpoints(place, keep_last) for place in (folder, earlier) if place is not None]
        self.occasions, self.tell = occasions, tell
        self._half: Checkpoint | None = None
        """What the worker is about to go on with."""

    def due(self, version: int) -> bool:
        """Is it time to save?"""
        return self.own is not None and self.occasions.rounds(version)

    def save(self, version: int, residual: Tensor | None) -> None:
        """Keep how things stand with this version's weights in hand. A full disk is told, and stops nobody."""
        if not self.due(version):
            return
        assert self.own is not None
        self._write(self.own, version, self._state(residual))

    def _state(self, residual: Tensor | None) -> dict[str, Any]:
        engine, world, on_gpu = self.engine, self.engine.world, self.engine.device.type == "cuda"
        random = {
            "torch": world.each(torch.get_rng_state()),
            "cuda": world.each(torch.cuda.get_rng_state(engine.device)) if on_gpu else [],
        }
        return {"engine": engine.state_dict(), "random": random, "residual": residual}

    def _write(self, place: Checkpoints, number: int, state: dict[str, Any]) -> None:
        try:
            if self.engine.world.talk is None:
                place.save(number, self.engine.weights(), state)
            else:
                place.save_together(number, self.engine.weights(), state, self.engine.world)
        except ShoalError as error:
            self.tell(f"warning: {error}")

    def restore(self, version: int, residual: Tensor | None) -> None:
        """Go on as one who was there. What is kept of an older version is better than nothing, of a newer one it is not."""
        found = self._newest_until(version)
        if found is not None:
            self._load(found, residual, weights=found.step == version)
        elif version > 0:
            self.tell(f"nothing is kept of this worker up to round {version}: its optimizer starts over")

    def _load(self, found: Checkpoint, residual: Tensor | None, weights: bool) -> None:
        engine, random, rank = self.engine, found.state["random"], self.engine.world.rank
        engine.load_state_dict(found.state["engine"])
        if weights:
            engine.load_weights(found.weights)
        if rank < len(random["torch"]):
            torch.set_rng_state(random["torch"][rank])
        if rank < len(random["cuda"]) and engine.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"][rank], engine.device)
        if residual is not None and found.state["residual"] is not None:
            residual.copy_(found.state["residual"])

    def _newest_until(self, version: int) -> Checkpoint | None:
        paths = [path for place in self.places for path in place.all() if path.name <= f"step-{version:08d}"]
        for path in sorted(paths, key=lambda path: path.name, reverse=True):
            try:
                return read_checkpoint(path)
            except ShoalError as error:
                self.tell(f"warning: {error}; trying the one before it")
        return None

    # --- the middle of a round ---------------------------------------------------------------------

    def steps_until_save(self, step: int) -> int:
        every = self.occasions.every_steps
        return every - step % every if every and self.halves is not None else sys.maxsize

    def save_partial_round(self, half: PartialRound | None, residual: Tensor | None) -> None:
        """Keep how things stand after this step, in place of what was kept before. The first process knows how far the worker is."""
        assert self.halves is not None
        whole = {"half": None if half is None else half._asdict(), "shape": self.occasions.shape, "gathered": self.engine.gathered()}
        self._write(self.halves, self.engine.step_count, self._state(residual) | whole)

    def find_partial_round(self, begins: RoundStart) -> PartialRound | None:
        """What is of no use any more is deleted, with a word about it."""
        found = self._read_half()
        if found is None:
            return None
        half = _half_of(found.state["half"])
        why = "it cannot be read" if half is None else self._why_useless(half, found, begins)
        if not why:
            self._half = found
            return half
        steps = "" if half is None else f" ({half.steps} of {half.inner_steps} steps of round {half.began.version + 1})"
        self.tell(f"the half round that this worker kept{steps} is of no use any more: {why}; it is deleted")
        self.delete_partial_round()
        return None

    def _why_useless(self, half: PartialRound, found: Checkpoint, begins: RoundStart) -> str:
        if found.state["shape"] != self.occasions.shape:
            return "settings have changed"
        if half.was_taken(begins):
            return ""
        if half.began.version != begins.version:
            return f"the run is at round {begins.version + 1}"
        if half.began.place != begins.place:
            return "this worker has another place at the data"
        return "" if half.began.weights == begins.weights else "the round begins with other weights"

    def _read_half(self) -> Checkpoint | None:
        """What is damaged is named, and deleted."""
        paths = self.halves.all() if self.halves is not None else []
        try:
            return read_checkpoint(paths[-1]) if paths else None
        except ShoalError as error:
            self.tell(f"warning: {error}; it is deleted, and the round is begun again")
            self.delete_partial_round()
            return None

    def has_partial_round(self, step: int) -> bool:
        """For a process that is not the first: whether it has its part of the half round that was kept after this step."""
        found = self._read_half()
        whole = found is not None and found.step == step and found.state["shape"] == self.occasions.shape
        self._half = found if whole else None
        return whole

    @property
    def partial_round_step(self) -> int:
        """After which step the half round was kept that `find_partial_round` gave."""
        assert self._half is not None
        return self._half.step

    def resume_partial_round(self, residual: Tensor | None, within: bool) -> None:
        found, self._half = self._half, None
        assert found is not None
        self._load(found, residual, weights=within)
        if within:
            self.engine.load_gathered(found.state["gathered"])

    def delete_partial_round(self) -> None:
        """Of processes that share it, the first one deletes it."""
        self._half = None
        if self.halves is not None and self.engine.world.first and self.halves.folder.exists():
            shutil.rmtree(self.halves.folder, ignore_errors=True)


def _half_of(kept: Any) -> PartialRound | None:
    """What a file says of how far a worker was; None: it says something else."""
    try:
        version, weights, place = kept["began"]
        return PartialRound(**kept | {"began": RoundStart(version, weights, SeatAssigned(*place)), "place": SeatAssigned(*kept["place"])})
    except (TypeError, KeyError, ValueError):
        return None
