"""What only a worker knows, and a run that goes on needs: its optimizer, its random numbers, what its codec still owes.

A folder of the worker's own, with a checkpoint for each of the coordinator's. Who comes back without it starts its optimizer over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.worker.checkpoint import Checkpoint, Checkpoints, read


class Kept(Protocol):
    """The engine of a worker that takes steps of its own."""

    device: torch.device

    def weights(self) -> dict[str, Tensor]: ...
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Keepsakes:
    """One worker's, in `folder`; those of a run that this one continues, in `earlier`."""

    def __init__(
        self, folder: Path | None, earlier: Path | None, due: Callable[[int], bool], keep_last: int, tell: Callable[[str], None]
    ) -> None:
        self.own = Checkpoints(folder, keep_last) if folder is not None else None
        self.places = [Checkpoints(place, keep_last) for place in (folder, earlier) if place is not None]
        self.due, self.tell = due, tell

    def save(self, version: int, engine: Kept, residual: Tensor | None) -> None:
        """Keep how things stand with this version's weights in hand. A full disk is told, and stops nobody."""
        if self.own is None or not self.due(version):
            return
        cuda = torch.cuda.get_rng_state_all() if engine.device.type == "cuda" else []
        state = {"engine": engine.state_dict(), "random": {"torch": torch.get_rng_state(), "cuda": cuda}, "residual": residual}
        try:
            self.own.save(version, engine.weights(), state)
        except ShoalError as error:
            self.tell(f"warning: {error}")

    def restore(self, version: int, engine: Kept, residual: Tensor | None) -> None:
        """Go on as one who was there. What is kept of an older version is better than nothing, of a newer one it is not."""
        found = self._newest_until(version)
        if found is None:
            if version > 0:
                self.tell(f"nothing is kept of this worker up to round {version}: its optimizer starts over")
            return
        engine.load_state_dict(found.state["engine"])
        if found.step == version:
            engine.load_weights(found.weights)
        torch.set_rng_state(found.state["random"]["torch"])
        if found.state["random"]["cuda"] and engine.device.type == "cuda":
            torch.cuda.set_rng_state_all(found.state["random"]["cuda"])
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
