"""Checkpoints: safetensors and JSON in a folder that appears whole or not at all.

checkpoints/
  latest                      the name of the newest
  step-00000200/
    weights.safetensors       parameters and buffers, `player.name`
    state.safetensors         the tensors of the state: optimizer moments, random numbers
    state.json                everything else, the checksums of the files, and at its end its own

Files and folder are synced to the disk (fsync) before the folder gets its name; then the folder around it is synced.

Several processes write folders `weights/` and `state/` instead, with one file for each process (sharded_checkpoint.py); `read_checkpoint`
reads both forms.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.engines import Engine, World
from shoal.errors import ShoalError
from shoal.files import DamagedFileError, check_format, make_folder, open_to_read, parse_json, write_file, writing
from shoal.freed_memory import return_freed_memory
from shoal.protocol.checksums import crc32
from shoal.runs.folder.sharded_checkpoint import ShardedTensors, write_from_first, write_shards
from shoal.updates.state_packing import Checkpoint, packed, unpacked

_FORMAT = 3
"""Version of the format. Files of other versions are refused."""
_OWN_CHECKSUM = ', "checksum": "'
_PLAIN_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
_FILES = ("weights.safetensors", "state.safetensors")
_ALIGNED = 64
"""Copies begin at multiples of this number of bytes, as their types demand."""
_DIGEST = "sha256"
"""Field of the metadata of a file of weights that stands alone."""


class HostCopies:
    """Copies in main memory of tensors of any device. A GPU copies to page-locked memory at the full speed of its link; that memory is kept
    for the next copies, so the copies are valid until then."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> None:
        """Allocate the page-locked memory, which takes the system a third of a second for a gigabyte."""
        if size > len(self._room):
            self._room = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = {name: value.detach() for name, value in tensors.items()}
        on_gpu = {name: value for name, value in values.items() if value.is_cuda}
        ends = list(accumulate(-(-value.nbytes // _ALIGNED) * _ALIGNED for value in on_gpu.values()))
        self.reserve(ends[-1] if on_gpu else 0)
        copies = {name: value.clone() for name, value in values.items() if not value.is_cuda}
        for (name, value), start in zip(on_gpu.items(), [0, *ends], strict=False):
            copies[name] = self._room[start : start + value.nbytes].view(value.dtype).view(value.shape)
            copies[name].copy_(value, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return copies


class Checkpoints:
    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self._copies = HostCopies()
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[Any] | None = None

    def prepare(self, size: int) -> None:
        """Let the thread allocate the memory that `save_behind` copies this number of bytes to."""
        self._begin_behind(lambda: self._copies.reserve(size))

    def _begin_behind(self, work: Callable[[], Any]) -> None:
        self.wait()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way = self._thread.submit(work)

    def save_behind(self, step: int, weights: Mapping[str, Tensor], state: dict[str, Any]) -> None:
        """Copy the values, and let a thread write the checkpoint. One is written at a time: this waits for the one before, and raises
        ShoalError where it failed."""
        self.wait()  # its values are copied to the memory of the one before
        self._begin_behind(self.copied(step, weights, state))

    def wait(self) -> None:
        """Wait for the checkpoint that a thread writes. Raises ShoalError where it failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def save(self, step: int, weights: Mapping[str, Tensor], state: dict[str, Any], writers: World | None = None) -> None:
        """Write a checkpoint, point `latest` at it, and delete the oldest. Raises ShoalError; the older ones are then kept.

        Where there are several `writers`, each writes its part: all must call this, and all succeed or raise.
        """
        self.wait()
        return_freed_memory()  # of training steps: writing needs some
        tensors = dict[str, Tensor]()
        plain = packed(state, "", tensors, copy=False)
        tensors = _apart(tensors)
        if writers is None or writers.talk is None:
            self._save(step, weights, tensors, plain)
        else:
            self._save_together(step, weights, tensors, plain, writers)

    def copied(self, step: int, weights: Mapping[str, Tensor], state: dict[str, Any]) -> Callable[[], Path]:
        """A function that writes a checkpoint of the current values, from any thread: all tensors are copied first."""
        tensors = dict[str, Tensor]()
        plain = packed(state, "", tensors, copy=False)
        copies = self._copies.take(
            {f"w{name}": value for name, value in weights.items()} | {f"s{name}": one for name, one in tensors.items()}
        )
        copied_weights, copied_state = ({name[1:]: value for name, value in copies.items() if name[0] == kind} for kind in "ws")
        return lambda: self._save(step, copied_weights, copied_state, plain)

    def _save(self, step: int, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], plain: Any) -> Path:
        partial = self._partial(step)
        try:
            self._begin(partial)
            for name, values in zip(_FILES, (weights, tensors), strict=True):
                _save(partial / name, values)
            return self._finish(partial, step, plain)
        except (OSError, ShoalError) as error:
            raise self._failed(partial, error) from None

    def _save_together(self, step: int, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], plain: Any, writers: World) -> None:
        partial = self._partial(step)
        self._alone(writers, lambda: self._begin(partial), partial)
        try:
            for kind, values in (("weights", weights), ("state", tensors)):
                if writers.apart:
                    write_from_first(partial / kind, values, writers)
                else:
                    write_shards(partial / kind, values, writers.talk)
        except ShoalError as error:
            raise self._failed(partial, error) from None
        self._alone(writers, lambda: self._finish(partial, step, plain), partial)

    def _alone(self, writers: World, work: Callable[[], Any], partial: Path) -> None:
        """The first process works; where it fails, all processes raise ShoalError."""
        problem = ""
        if writers.first:
            try:
                work()
            except (OSError, ShoalError) as error:
                problem = str(self._failed(partial, error))
        if problem := writers.broadcast_text(problem):
            raise ShoalError(problem)

    def _partial(self, step: int) -> Path:
        return self.folder / f".partial-step-{step:08d}"

    def _begin(self, partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def _finish(self, partial: Path, step: int, plain: Any) -> Path:
        """After all tensors are written: write the checksums, and give the folder its name."""
        files = sorted(path.relative_to(partial).as_posix() for path in partial.rglob("*.safetensors"))
        header = {"format": _FORMAT, "step": step, "checksums": {name: _checksum(partial / name) for name in files}, "state": plain}
        with writing(partial / "state.json"):
            (partial / "state.json").write_bytes(_with_checksum(json.dumps(header)))
        for name in (*files, "state.json"):
            with (partial / name).open("rb+") as stream:
                os.fsync(stream.fileno())
        _sync_folder(partial)
        final = self.folder / f"step-{step:08d}"
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        write_file(self.folder / "latest", final.name)
        _sync_folder(self.folder)
        others = [path for path in self.all() if path != final]
        for old in others[: max(0, len(others) + 1 - self.keep_last)]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def _failed(self, partial: Path, error: OSError | ShoalError) -> ShoalError:
        shutil.rmtree(partial, ignore_errors=True)
        why = error if isinstance(error, ShoalError) else f"{error.filename or partial}: {error.strerror or error}"
        return ShoalError(f"cannot save a checkpoint in {self.folder}: {why}; the older ones are untouched")

    def forget_after(self, step: int) -> None:
        """Delete the checkpoints of steps that a resumed run repeats; they are damaged, since an older one was chosen."""
        for path in self.all():
            if path.name > f"step-{step:08d}":
                shutil.rmtree(path, ignore_errors=True)

    def all(self) -> list[Path]:
        """Every whole checkpoint, oldest first."""
        return sorted(self.folder.glob("step-*")) if self.folder.is_dir() else []

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        return newest_readable(self.all(), read_checkpoint, warn)


def may_save_behind(engine: Engine) -> bool:
    """Whether a thread may write a checkpoint: where a GPU trains, whose memory is another than that of the copy, in one process."""
    return engine.device.type == "cuda" and engine.world.talk is None


def newest_readable(paths: list[Path], read: Callable[[Path], Checkpoint], warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that can be read. `warn`: is called for each that cannot."""
    for path in sorted(paths, key=lambda path: path.name, reverse=True):
        try:
            return read(path)
        except ShoalError as error:
            warn(f"{error}; trying the one before it")
    return None


def read_checkpoint(path: Path, verify: bool = True) -> Checkpoint:
    """Read a checkpoint. `verify`: check that its files match their checksums. Raises ShoalError."""
    try:
        header = _header_of(path)
        for name, checksum in header["checksums"].items():
            if verify and _checksum(path / name) != checksum:
                raise ShoalError(f"checkpoint {path} is damaged: {name} does not match its checksum")
        weights, tensors = (_tensors(path, kind, list(header["checksums"])) for kind in ("weights", "state"))
        return Checkpoint(path, header["step"], weights, unpacked(header["state"], tensors))
    except FileNotFoundError as error:
        raise ShoalError(f"checkpoint {path} is not whole: {Path(error.filename or str(error)).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ShoalError(f"checkpoint {path} cannot be read: {error}") from None


def copy_to_all(path: Path, world: World, own: Path) -> Path:
    """Copy a checkpoint of the first process to all: the others write it below their folder `own`, and replace an older copy."""
    names = sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file()) if world.first else []
    copy = path if world.first else own / "checkpoints" / "of-the-first"
    if not world.first:
        shutil.rmtree(copy.parent, ignore_errors=True)
    for name in world.broadcast_text("\n".join(names)).split("\n"):
        if not _PLAIN_NAME.fullmatch(name):
            raise ShoalError(f"the first process has a file with an impossible name in its checkpoint: {name!r}")
        content = world.broadcast_bytes((path / name).read_bytes() if world.first else b"")
        if not world.first:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)
    return copy


def random_states(engine: Engine) -> dict[str, list[Tensor]]:
    """The random-number states of all processes of an engine, in the order of their ranks."""
    world, on_gpu = engine.world, engine.device.type == "cuda"
    return {
        "torch": world.each(torch.get_rng_state()),
        "cuda": world.each(torch.cuda.get_rng_state(engine.device)) if on_gpu else [],
    }


def restore_random_states(engine: Engine, states: dict[str, list[Tensor]]) -> None:
    """Every process restores its own state. A process whose rank did not exist before keeps the state of its seed."""
    rank = engine.world.rank
    if rank < len(states["torch"]):
        torch.set_rng_state(states["torch"][rank])
    if rank < len(states["cuda"]) and engine.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"][rank], engine.device)


def _with_checksum(text: str) -> bytes:
    """A JSON object with one more field at its end: the checksum of everything before it."""
    content = text.removesuffix("}").encode()
    return content + f'{_OWN_CHECKSUM}{crc32(content):08x}"}}'.encode()


def _header_of(path: Path) -> dict[str, Any]:
    """The content of state.json. Raises ShoalError where its version or its checksum does not match."""
    with open_to_read(path / "state.json") as file:
        content = file.read()
    header: dict[str, Any] = parse_json(content)
    check_format(path, "checkpoint", header["format"], _FORMAT)
    body, _, checksum = content.rpartition(_OWN_CHECKSUM.encode())
    if checksum != f'{crc32(body):08x}"}}'.encode():
        raise ShoalError(f"checkpoint {path} is damaged: state.json does not match its checksum")
    return header


def _sync_folder(folder: Path) -> None:
    """Sync the list of files in a folder to the disk. Windows does so by itself, and has no call for it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not support it
            raise
    finally:
        os.close(descriptor)


def _tensors(path: Path, kind: str, files: list[str]) -> Mapping[str, Tensor]:
    """The tensors of `weights` or `state`, from one file or from the shards of several processes, which write none for no tensors."""
    if any("/" in name for name in files):
        return ShardedTensors([path / name for name in files if name.startswith(f"{kind}/")])
    return load_file(path / f"{kind}.safetensors")


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, of which one is copied where it begins within another: a file takes none that share memory."""
    end, found = 0, dict[str, Tensor]()
    for name, value in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        begin = value.data_ptr()
        found[name] = value.clone() if begin < end else value
        end = max(end, begin + value.nbytes)
    return found


def _save(path: Path, weights: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a file that those may read who may read its folder; safetensors gives it to its owner alone. Raises ShoalError."""
    try:
        save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, path, metadata)
        path.chmod(path.parent.stat().st_mode & 0o644 | 0o600)
    except (OSError, SafetensorError) as error:
        final = path.with_name(path.name.removeprefix(".").removesuffix(".partial"))
        raise ShoalError(f"cannot write {final}: {getattr(error, 'strerror', None) or error}") from None


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights atomically to one file, with their digest in its metadata. Raises ShoalError."""
    partial = path.with_name(f".{path.name}.partial")
    make_folder(path.parent)
    _save(partial, weights, {"format": "pt", _DIGEST: digest_of(weights)})
    with writing(path):
        os.replace(partial, path)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a file of `save_weights`, or one without a digest. Raises ShoalError."""
    return dict(read_weights(path).weights)


def read_weights(path: Path) -> Checkpoint:
    """A file of weights as a checkpoint without state; its metadata contains the step. Raises ShoalError."""
    try:
        open_to_read(path).close()
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        step, weights = int(metadata.get("step", 0)), load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ShoalError(f"cannot read the weights in {path}: {error}") from None
    if metadata.get(_DIGEST) not in (None, digest_of(weights)):
        raise DamagedFileError(f"{path} is damaged: its weights do not match their digest; put the file back from a backup")
    return Checkpoint(path, step, weights, {})


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {[*value.shape]}\n".encode())
        raw: Any = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(raw)
    return digest.hexdigest()


def find_checkpoint(path: str, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint at a path: a checkpoint, or the newest of a run. Raises ShoalError."""
    place = Path(path)
    if (place / "state.json").exists():
        return read_checkpoint(place)
    found = Checkpoints(place / "checkpoints", 1).newest(warn)
    if found is None:
        raise ShoalError(f"there is no checkpoint at {path}: name a run's folder, or one of its checkpoints")
    return found


def _checksum(path: Path) -> str:
    value = 0
    with open_to_read(path) as stream:
        while chunk := stream.read(1 << 22):
            value = crc32(chunk, value)
    return f"{value:08x}"
