"""What only a worker knows, and a run that goes on needs: its optimizer, its random numbers, what its codec still owes.

A folder of the worker's own, with a checkpoint for each of the coordinator's. Who comes back without it starts its optimizer over. Of a
worker of several processes all save, and all restore.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.runs.checkpoint import Checkpoint, Checkpoints, read
from shoal.worker.interfaces import World


class Kept(Protocol):
    """The engine of a worker that takes steps of its own."""

    device: torch.device

    @property
    def world(self) -> World: ...
    def weights(self) -> dict[str, Tensor]: ...
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Keepsakes:
    """One worker's, in `folder`; those of a run that this one continues, in `earlier`."""

    def __init__(
        self,
        engine: Kept,
        folder: Path | None,
        earlier: Path | None,
        due: Callable[[int], bool],
        keep_last: int,
        tell: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.own = Checkpoints(folder, keep_last) if folder is not None else None
        self.places = [Checkpoints(place, keep_last) for place in (folder, earlier) if place is not None]
        self._due, self.tell = due, tell

    def due(self, version: int) -> bool:
        """Is it time to save?"""
        return self.own is not None and self._due(version)

    def save(self, version: int, residual: Tensor | None) -> None:
        """Keep how things stand with this version's weights in hand. A full disk is told, and stops nobody."""
        if not self.due(version):
            return
        assert self.own is not None
        engine, world, on_gpu = self.engine, self.engine.world, self.engine.device.type == "cuda"
        random = {
            "torch": world.each(torch.get_rng_state()),
            "cuda": world.each(torch.cuda.get_rng_state(engine.device)) if on_gpu else [],
        }
        state = {"engine": engine.state_dict(), "random": random, "residual": residual}
        try:
            if world.talk is None:
                self.own.save(version, engine.weights(), state)
            else:
                self.own.save_together(version, engine.weights(), state, world)
        except ShoalError as error:
            self.tell(f"warning: {error}")

    def restore(self, version: int, residual: Tensor | None) -> None:
        """Go on as one who was there. What is kept of an older version is better than nothing, of a newer one it is not."""
        found = self._newest_until(version)
        if found is None:
            if version > 0:
                self.tell(f"nothing is kept of this worker up to round {version}: its optimizer starts over")
            return
        engine, random, rank = self.engine, found.state["random"], self.engine.world.rank
        engine.load_state_dict(found.state["engine"])
        if found.step == version:
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
                return read(path)
            except ShoalError as error:
                self.tell(f"warning: {error}; trying the one before it")
        return None
