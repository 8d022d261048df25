"""Checkpoints: safetensors and JSON in a folder that appears whole or not at all.

checkpoints/
  latest                      the name of the newest
  step-00000200/
    weights.safetensors       parameters and buffers, `player.name`
    state.safetensors         the tensors of the state: optimizer moments, random numbers
    state.json                everything else, and the checksums of the two
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.errors import ShoalError
from shoal.updates.packing import packed, unpacked

_FILES = ("weights.safetensors", "state.safetensors")


class Checkpoint(NamedTuple):
    """What was saved, and where."""

    path: Path
    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]


class Saved(Protocol):
    """A checkpoint, wherever it is."""

    @property
    def path(self) -> PurePath: ...
    @property
    def step(self) -> int: ...
    @property
    def weights(self) -> dict[str, Tensor]: ...
    @property
    def state(self) -> dict[str, Any]: ...


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last

    def save(self, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Write a checkpoint, then point `latest` at it, then forget the oldest. Raises ShoalError; older ones survive."""
        final = self.folder / f"step-{step:08d}"
        partial = self.folder / f".partial-{final.name}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write(partial, step, weights, state)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            _replace(self.folder / "latest", final.name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            why = getattr(error, "strerror", None) or error
            raise ShoalError(f"cannot save a checkpoint in {self.folder}: {why}; the older ones are untouched") from None
        others = [path for path in self.all() if path != final]
        for old in others[: max(0, len(others) + 1 - self.keep_last)]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def forget_after(self, step: int) -> None:
        """Drop the checkpoints of steps that a resumed run will do again: damaged ones, or there would be no need to."""
        for path in self.all():
            if path.name > f"step-{step:08d}":
                shutil.rmtree(path, ignore_errors=True)

    def all(self) -> list[Path]:
        """Every whole checkpoint, oldest first."""
        return sorted(self.folder.glob("step-*")) if self.folder.is_dir() else []

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that can be read; `warn` is told of any that cannot."""
        for path in reversed(self.all()):
            try:
                return read(path)
            except ShoalError as error:
                warn(f"{error}; trying the one before it")
        return None


def read(path: Path) -> Checkpoint:
    """A checkpoint, its checksums verified. Raises ShoalError."""
    try:
        header = json.loads((path / "state.json").read_text(encoding="utf-8"))
        for name in _FILES:
            if _checksum(path / name) != header["checksums"][name]:
                raise ShoalError(f"checkpoint {path} is damaged: {name} does not match its checksum")
        weights, tensors = (load_file(path / name) for name in _FILES)
        return Checkpoint(path, header["step"], weights, unpacked(header["state"], tensors))
    except FileNotFoundError as error:
        raise ShoalError(f"checkpoint {path} is not whole: {Path(error.filename).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ShoalError(f"checkpoint {path} cannot be read: {error}") from None


def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Weights alone, in one file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise ShoalError(f"cannot save the weights in {path}: {error}") from None


def load_weights(path: Path) -> dict[str, Tensor]:
    """What `save_weights` saved. Raises ShoalError."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ShoalError(f"cannot read the weights in {path}: {error}") from None


def read_weights(path: Path) -> Checkpoint:
    """Weights alone as a checkpoint: the step is written in the file. Raises ShoalError."""
    try:
        with safe_open(path, "pt") as file:
            step = int((file.metadata() or {}).get("step", 0))
    except (OSError, ValueError, SafetensorError) as error:
        raise ShoalError(f"cannot read the weights in {path}: {error}") from None
    return Checkpoint(path, step, load_weights(path), {})


def find(path: str, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that a path means: a checkpoint, or a run with some."""
    place = Path(path)
    if (place / "state.json").exists():
        return read(place)
    found = Checkpoints(place / "checkpoints", 1).newest(warn)
    if found is None:
        raise ShoalError(f"there is no checkpoint at {path}: name a run's folder, or one of its checkpoints")
    return found


def _write(folder: Path, step: int, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
    tensors: dict[str, Tensor] = {}
    plain = packed(state, "", tensors)
    save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, folder / _FILES[0])
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / _FILES[1])
    header = {"format": 1, "step": step, "checksums": {name: _checksum(folder / name) for name in _FILES}, "state": plain}
    (folder / "state.json").write_text(json.dumps(header), encoding="utf-8")
    for file in folder.iterdir():
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"
