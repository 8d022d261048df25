"""Worker-local checkpoints: optimizer, RNG state and codec residual, which the coordinator does not have.

A worker's folder contains one for each checkpoint of the coordinator, and in `half-round` the newest from the middle of a round. A worker
that returns without them starts with a new optimizer. All processes of a worker save and restore together.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shoal.engines import Engine
from shoal.errors import ShoalError
from shoal.files import check_format
from shoal.protocol.messages import SeatAssigned
from shoal.runs.folder.checkpoint import (
    Checkpoints,
    may_save_behind,
    newest_readable,
    random_states,
    read_checkpoint,
    restore_random_states,
)
from shoal.updates.state_packing import Checkpoint
from shoal.updates.worker_state import PartialRound, RoundStart

HALF = "half-round"
_FORMAT = 1
"""Version of the state inside a worker's checkpoint."""


class SaveSchedule(NamedTuple):
    rounds: Callable[[int], bool]
    """Whether to save with this version of the weights."""
    every_steps: int | None
    """Interval in steps for saving in the middle of a round; None: never."""
    shape: str
    """Digest of the settings that affect the numbers; a half round with another digest is not resumed."""


class WorkerCheckpoints:
    """The checkpoints of one worker in `folder`; `earlier`: those of the run that this one continues."""

    def __init__(
        self,
        engine: Engine,
        folder: Path | None,
        earlier: Path | None,
        occasions: SaveSchedule,
        keep_last: int,
        tell: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.own = Checkpoints(folder, keep_last) if folder is not None else None
        self.halves = Checkpoints(folder / HALF, 1) if folder is not None else None
        self.keeps_partial_rounds = folder is not None
        self.places = [Checkpoints(place, keep_last) for place in (folder, earlier) if place is not None]
        self.occasions, self.tell = occasions, tell
        self._half: Checkpoint | None = None
        """The half round that is about to be resumed."""

    def due(self, version: int) -> bool:
        return self.own is not None and self.occasions.rounds(version)

    def save(self, version: int, residual: Tensor | None) -> None:
        """Save the state with this version of the weights. An error of the disk is only reported."""
        if self.own is not None and self.occasions.rounds(version):
            self._write(self.own, version, self._state(residual))

    def _state(self, residual: Tensor | None) -> dict[str, Any]:
        return {"format": _FORMAT, "engine": self.engine.state_dict(), "random": random_states(self.engine), "residual": residual}

    def _write(self, place: Checkpoints, number: int, state: dict[str, Any]) -> None:
        try:
            if may_save_behind(self.engine):
                place.save_behind(number, self.engine.weights(), state)
            else:
                place.save(number, self.engine.weights(), state, self.engine.world)
        except ShoalError as error:
            self.tell(f"warning: {error}")

    def restore(self, version: int, residual: Tensor | None) -> None:
        """Load the newest state up to this version; one of a newer version is of no use."""
        paths = [path for place in self.places for path in place.all() if path.name <= f"step-{version:08d}"]
        found = newest_readable(paths, _read, lambda text: self.tell(f"warning: {text}"))
        if found is not None:
            self._load(found, residual, weights=found.step == version)
        elif version > 0:
            self.tell(f"this worker has no checkpoint up to round {version}: its optimizer starts over")

    def _load(self, found: Checkpoint, residual: Tensor | None, weights: bool) -> None:
        self.engine.load_state_dict(found.state["engine"])
        if weights:
            self.engine.load_weights(found.weights)
        restore_random_states(self.engine, found.state["random"])
        if residual is not None and found.state["residual"] is not None:
            residual.copy_(found.state["residual"])

    # --- the middle of a round ---------------------------------------------------------------------

    def steps_until_save(self, step: int) -> int:
        every = self.occasions.every_steps
        return every - step % every if every and self.halves is not None else sys.maxsize

    def save_partial_round(self, partial: PartialRound | None, residual: Tensor | None) -> None:
        """Save the state after this step, and replace the one before. `partial`: the progress of the round, known to the first process."""
        assert self.halves is not None
        whole = {"half": None if partial is None else partial._asdict(), "shape": self.occasions.shape, "gathered": self.engine.gathered()}
        self._write(self.halves, self.engine.step_count, self._state(residual) | whole)

    def find_partial_round(self, begins: RoundStart) -> PartialRound | None:
        """The half round to resume, or None. One that cannot be used is reported and deleted."""
        found = self._read_half()
        if found is None:
            return None
        half = _half_of(found.state["half"])
        why = "it cannot be read" if half is None else self._why_useless(half, found, begins)
        if not why:
            self._half = found
            return half
        steps = "" if half is None else f" ({half.steps} of {half.inner_steps} steps of round {half.began.version + 1})"
        self.tell(f"the partial round that this worker saved{steps} cannot be resumed: {why}; it is deleted")
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
        """Read the half round; a damaged one is reported and deleted."""
        paths = self.halves.all() if self.halves is not None else []
        try:
            return _read(paths[-1]) if paths else None
        except ShoalError as error:
            self.tell(f"warning: {error}; it is deleted, and the round starts again")
            self.delete_partial_round()
            return None

    def has_partial_round(self, step: int) -> bool:
        """For processes other than the first: whether this one has its part of the half round of this step."""
        found = self._read_half()
        whole = found is not None and found.step == step and found.state["shape"] == self.occasions.shape
        self._half = found if whole else None
        return whole

    @property
    def partial_round_step(self) -> int:
        """The step after which the half round that `find_partial_round` returned was saved."""
        assert self._half is not None
        return self._half.step

    def resume_partial_round(self, residual: Tensor | None, within: bool) -> None:
        found, self._half = self._half, None
        assert found is not None
        self._load(found, residual, weights=within)
        if within:
            self.engine.load_gathered(found.state["gathered"])

    def delete_partial_round(self) -> None:
        """Delete the half round; of processes that share it, only the first does."""
        self._half = None
        if self.halves is not None:
            with suppress(ShoalError):  # what could not be written is not needed either
                self.halves.wait()
        if self.halves is not None and self.engine.world.first and self.halves.folder.exists():
            shutil.rmtree(self.halves.folder, ignore_errors=True)


def _read(path: Path) -> Checkpoint:
    """Read a worker's checkpoint. Raises ShoalError."""
    found = read_checkpoint(path)
    check_format(path, "worker checkpoint", found.state.get("format"), _FORMAT)
    return found


def _half_of(kept: Any) -> PartialRound | None:
    """The progress of a half round as read from a file; None where it is malformed."""
    try:
        version, weights, place = kept["began"]
        return PartialRound(**kept | {"began": RoundStart(version, weights, SeatAssigned(*place)), "place": SeatAssigned(*kept["place"])})
    except (TypeError, KeyError, ValueError):
        return None
