"""Rounds that `updates.scorer` measured: their weights, and the contributions as they came, in the run's folder.

An audit can measure them again. Only the newest ones are kept.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.coordinator.effects import Measured
from shoal.errors import ShoalError
from shoal.files import make_folder, writing
from shoal.protocol.messages import Frames

_NAME = re.compile(r"round-(\d{8,12})\.safetensors")


class KeptRound(NamedTuple):
    """A measured round."""

    version: int
    weights: Tensor
    buffers: Tensor
    contributions: list[tuple[dict[str, Any], Frames]]


def keep_round(folder: Path, measured: Measured, most: int) -> None:
    """Write a round, and remove those beyond the newest `most`."""
    place = make_folder(folder / "measured")
    tensors = {"weights": measured.weights, "buffers": measured.buffers}
    for number, (_, frames) in enumerate(measured.contributions):
        tensors |= {f"{number}.{part}": _bytes(frame) for part, frame in enumerate(frames)}
    records = json.dumps([[record, len(frames)] for record, frames in measured.contributions])
    path = place / f"round-{measured.version:08}.safetensors"
    with writing(path):
        save_file(tensors, path.with_suffix(".part"), {"records": records})
        path.with_suffix(".part").replace(path)
        for old in _files(folder)[:-most]:
            old.unlink()


def kept_rounds(folder: Path) -> list[KeptRound]:
    """The rounds that a folder has, oldest first. Raises ShoalError for a file that cannot be read."""
    return [_read(path) for path in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "measured").glob("round-*.safetensors") if _NAME.fullmatch(path.name))


def _read(path: Path) -> KeptRound:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    try:
        with safe_open(path, "pt") as file:
            records = json.loads(file.metadata()["records"])
            found: list[tuple[dict[str, Any], Frames]] = [
                (record, tuple(file.get_tensor(f"{number}.{part}").numpy().data for part in range(frames)))
                for number, (record, frames) in enumerate(records)
            ]
            return KeptRound(int(match[1]), file.get_tensor("weights"), file.get_tensor("buffers"), found)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ShoalError(f"{path} cannot be read: {error}") from None


def _bytes(frame: Any) -> Tensor:
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8) if len(frame) else torch.empty(0, dtype=torch.uint8)
