"""Checkpoints that several processes write together: torch.distributed.checkpoint, as safetensors.

Each process writes the rows that it holds, with their offsets in the header of its file. The reader assembles one tensor at a time, so a
checkpoint can be read by any number of processes of any engine.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from shoal.engines.world import World
from shoal.errors import ShoalError

_INFO = "DCP_SHARDING_INFO"


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write each process's part of these tensors. All processes must call it. Raises ShoalError in all of them."""
    from torch.distributed.checkpoint.api import CheckpointException  # here: it takes as long to import as half of torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_together

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of torch about its own code
            save_together(dict(tensors), storage_writer=writer, process_group=group)
    except (CheckpointException, SafetensorError, OSError) as error:
        raise ShoalError(f"cannot write {folder}: {_reason(error)}") from None


def write_dcp(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors from this process, in the form of torch.distributed.checkpoint itself. Raises ShoalError."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_together

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is only one process
            save_together(
                {name: value.detach().cpu() for name, value in tensors.items()}, storage_writer=FileSystemWriter(folder), no_dist=True
            )
    except (CheckpointException, OSError) as error:
        raise ShoalError(f"cannot write {folder}: {_reason(error)}") from None


def write_from_first(folder: Path, tensors: Mapping[str, Tensor], writers: World) -> None:
    """The same where the processes share no folder: the first one writes a file for each. Raises ShoalError in all of them."""
    own = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    problem, known = "", set(own)
    if writers.first:
        problem = _written(folder, 0, own)
    for number, content in enumerate(writers.collected(b"" if writers.first else save(own)), 1):
        theirs = {name: value for name, value in load(content).items() if name not in known}
        known |= set(theirs)
        problem = problem or _written(folder, number, theirs)
    if problem := writers.broadcast_text(problem):
        raise ShoalError(problem)


def _written(folder: Path, number: int, tensors: dict[str, Tensor]) -> str:
    """Write one process's tensors. Return the error, or an empty text."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / f"process-{number:05d}.safetensors")
    except (OSError, SafetensorError) as error:
        return f"cannot write {folder}: {_reason(error)}"
    return ""


def _reason(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    first = next(iter(failures.values()), None)
    cause = first[0] if isinstance(first, tuple) else first or error
    return str(getattr(cause, "strerror", None) or cause)


class TensorShard(NamedTuple):
    """A part of a tensor in a file, and its offset in the whole tensor."""

    file: Path
    start: tuple[int, ...]
    shape: tuple[int, ...]


def _expect_whole(name: str, pieces: list[TensorShard]) -> None:
    """Raises ShoalError where pieces do not fill a tensor, before memory is taken for it."""
    kinds = all(len(piece.start) == len(piece.shape) and all(type(at) is int and at >= 0 for at in piece.start) for piece in pieces)
    shape = [max(ends) for ends in zip(*(map(add, piece.start, piece.shape) for piece in pieces), strict=True)] if kinds else []
    if not kinds or math.prod(shape) != sum(math.prod(piece.shape) for piece in pieces):
        raise ShoalError(f"{pieces[0].file.parent} is damaged: the parts of {name} do not fill it")


class ShardedTensors(Mapping[str, Tensor]):
    """The tensors of several files of shards. Each tensor is assembled when it is read."""

    def __init__(self, files: list[Path]) -> None:
        self._open: dict[Path, Any] = {}
        self._pieces: dict[str, list[TensorShard]] = {}
        for file in sorted(files):
            try:
                self._add(file)
            except (SafetensorError, ValueError, TypeError, AttributeError, RecursionError) as error:
                raise ShoalError(f"{file} is damaged: {error}") from None

    def _add(self, file: Path) -> None:
        opened: Any = safe_open(file, framework="pt")
        self._open[file] = opened
        offsets = json.loads((opened.metadata() or {}).get(_INFO, "{}"))
        for name in opened.keys():  # noqa: SIM118
            shape = tuple(opened.get_slice(name).get_shape())
            start = tuple(offsets.get(name, {}).get("saved_offsets", (0,) * len(shape)))
            self._pieces.setdefault(name, []).append(TensorShard(file, start, shape))

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        first: Tensor = self._open[pieces[0].file].get_tensor(name)
        if len(pieces) == 1:
            return first
        _expect_whole(name, pieces)
        ends = ([start + length for start, length in zip(piece.start, piece.shape, strict=True)] for piece in pieces)
        whole = torch.empty([max(along) for along in zip(*ends, strict=True)], dtype=first.dtype)
        for piece in pieces:
            place = tuple(slice(start, start + length) for start, length in zip(piece.start, piece.shape, strict=True))
            whole[place] = self._open[piece.file].get_tensor(name)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
