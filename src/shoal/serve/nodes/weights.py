"""A model's weights, tensor by tensor: in memory, in safetensors files, or sent to a machine without the files.

A machine that receives tensors checks their digests, and caches them in the user's state folder.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config.environment import state_folder
from shoal.errors import ShoalError
from shoal.freed_memory import return_freed_memory
from shoal.models.huggingface.tensor_names import stacked_experts
from shoal.models.packed.model import PackedModel
from shoal.protocol.messages import Frame

PIECE_BYTES = 8 << 20
"""Bytes of a tensor in one message."""
_MOST_BYTES = 1 << 40
_MOST_KEPT = 64 << 20
"""Bytes of packed tensors that stay while they are sent: several machines ask for pieces of different tensors in turn."""
_FLOATS, _INTEGERS = (torch.float32, torch.float64, torch.float16, torch.bfloat16), (torch.int64, torch.int8, torch.uint8)
_IN_FILES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPES = {str(one).removeprefix("torch."): one for one in (*_FLOATS, *_INTEGERS)}


def as_frame(tensor: Tensor) -> Frame:
    """The bytes of a tensor."""
    raw: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(raw)


def type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def from_frame(frame: Frame | bytearray, shape: Any, name: Any) -> Tensor:
    """The tensor in a frame. Raises ShoalError where its length does not match its shape."""
    if len(frame) != claimed_bytes(shape, name):
        raise ShoalError(f"{len(frame)} bytes are no tensor of shape {shape} and type {name}")
    owned = frame if isinstance(frame, bytearray) else bytearray(frame)
    return torch.frombuffer(owned, dtype=_TYPES[name]).view(shape)


def claimed_bytes(shape: Any, name: Any) -> int:
    """Bytes of a tensor of this shape and type. Raises ShoalError where they are not valid."""
    sizes = isinstance(shape, list) and len(shape) <= 8 and all(type(one) is int and 0 < one < 2**40 for one in shape)
    if not sizes or not isinstance(name, str) or name not in _TYPES:
        raise ShoalError(f"there is no tensor of shape {shape} and type {name}")
    return int(math.prod(shape) * _TYPES[name].itemsize)


class WeightStore:
    """The weights of a model on the server."""

    def __init__(self, held: Mapping[str, Tensor], files: Mapping[str, tuple[Path, str]] | None = None) -> None:
        """`held`: tensors in memory, by name; `files`: the file of each other name, and its key in the file."""
        self.held, self.files = held, files or {}
        self.served_as: torch.dtype | None = None
        """The type that floats are converted to; null: that in which they are stored."""
        self.stacks = stacked_experts(self.files)
        """Tensors of mixtures that are stored in parts: the parts of each expert."""
        self._stack = ("", torch.empty(0))
        """The stack that was read last: it is sent in pieces."""
        self._digests: dict[str, str] = {}

    @classmethod
    def of_folder(cls, folder: Path, prefix: str = "") -> WeightStore:
        """The safetensors of a folder. Nothing is read yet."""
        from safetensors import SafetensorError, safe_open

        found: dict[str, tuple[Path, str]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(str(file), framework="pt") as opened:
                    found |= {f"{prefix}{key}": (file, key) for key in opened.keys()}  # noqa: SIM118 - it is no mapping
            except (OSError, SafetensorError) as error:
                raise ShoalError(f"{file} is damaged: {error}") from None
        routers = [name for name in found if name.endswith(".block_sparse_moe.gate.weight")]  # the older name in files of Mixtral
        return cls({}, found | {name.replace(".block_sparse_moe.", ".mlp."): found[name] for name in routers})

    def __contains__(self, name: object) -> bool:
        return name in self.held or name in self.files or name in self.stacks

    def get(self, name: str) -> Tensor:
        tensor = self.held[name] if name in self.held else self._stacked(name) if name in self.stacks else _read(*self._file_of(name))
        return tensor.to(self.served_as) if self.served_as is not None and tensor.is_floating_point() else tensor

    def stored_type(self, name: str) -> torch.dtype | None:
        """The type in which a tensor is stored; None: one that models do not compute with."""
        from safetensors import safe_open

        if name in self.held:
            return self.held[name].dtype
        path, key = self._file_of(self.stacks[name][0][0] if name in self.stacks else name)
        with safe_open(str(path), framework="pt") as opened:
            return _IN_FILES.get(opened.get_slice(key).get_dtype())

    def _stacked(self, name: str) -> Tensor:
        """The matrices of all experts of a layer. Raises ShoalError where they do not have one shape."""
        if self._stack[0] != name:
            parts = [[_read(*self.files[one]) for one in expert] for expert in self.stacks[name]]
            if len({(part.shape, part.dtype) for expert in parts for part in expert}) > 1 or parts[0][0].dim() != 2:
                raise ShoalError(f"the matrices of the experts {name[:200]} differ in shape or type")
            (rows, columns), count = parts[0][0].shape, len(parts[0])
            made = torch.empty(len(parts), count * rows, columns, dtype=parts[0][0].dtype)
            for expert, own in zip(made, parts, strict=True):
                torch.cat(own, out=expert)
            self._stack = name, made
        return self._stack[1]

    def _file_of(self, name: str) -> tuple[Path, str]:
        if name not in self.files:
            raise ShoalError(f"the model has no tensor {name[:200]!r}")
        return self.files[name]

    def digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = hashlib.sha256(as_frame(self.get(name))).hexdigest()
        return self._digests[name]

    def answer(self, header: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Frame, ...]]:
        """The reply to a request for a tensor: its file, its digest, or a piece of it."""
        name, start = str(header.get("name")), header.get("start")
        if type(start) is int and 0 <= start < _MOST_BYTES:
            return {"kind": "piece"}, (as_frame(self.get(name))[start : start + PIECE_BYTES],)
        if header.get("digest"):
            tensor = self.get(name)
            return {"kind": "tensor", "digest": self.digest(name), "shape": list(tensor.shape), "type": type_name(tensor)}, ()
        if name not in self:
            raise ShoalError(f"the model has no tensor {name[:200]!r}")
        if name not in self.files or self.served_as is not None:
            return {"kind": "tensor", "where": None}, ()
        path, key = self.files[name]  # a process of the same machine reads the file itself, if its stamp is the same
        return {"kind": "tensor", "where": [str(path.resolve()), key, list(_stamp(path))]}, ()


class PackedStore(WeightStore):
    """The tensors of a model with packed layers. Those that are being sent stay packed until their last piece is sent."""

    def __init__(self, model: PackedModel) -> None:
        super().__init__({})
        self._model = model
        self._packed: dict[str, Tensor] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._model.names

    def get(self, name: str) -> Tensor:
        if name not in self:
            raise ShoalError(f"the model has no tensor {name[:200]!r}")
        if (tensor := self._packed.pop(name, None)) is None:
            tensor = self._model.get(name)
            while self._packed and tensor.nbytes + sum(one.nbytes for one in self._packed.values()) > _MOST_KEPT:
                del self._packed[next(iter(self._packed))]
        self._packed[name] = tensor
        return tensor

    def answer(self, header: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Frame, ...]]:
        about, frames = super().answer(header)
        if frames and len(frames[0]) < PIECE_BYTES:
            self._packed.pop(str(header.get("name")), None)
            return_freed_memory()
        return about, frames


class RemoteWeights:
    """The server's tensors, as another machine gets them."""

    def __init__(self, ask: Callable[[dict[str, Any]], tuple[Mapping[str, Any], tuple[Frame, ...]]]) -> None:
        self.ask = ask
        self.folder = state_folder() / "tensors"
        self.received_bytes = 0

    def get(self, name: str) -> Tensor:
        where = self.ask({"kind": "tensor", "name": name})[0].get("where")
        if where is not None:
            path, key, stamp = Path(where[0]), str(where[1]), tuple(where[2])
            if _stamp(path) == stamp:
                return _read(path, key)
        about = self.ask({"kind": "tensor", "name": name, "digest": True})[0]
        digest = str(about["digest"])
        if len(digest) != 64 or not digest.isalnum():
            raise ShoalError(f"the server's digest of {name} is none")
        kept = self.folder / digest
        raw = self._kept(kept, digest) or self._receive(name, kept, digest, about)
        return from_frame(raw, about["shape"], about["type"])

    def _kept(self, path: Path, digest: str) -> bytearray | None:
        try:
            with path.open("rb") as file:
                raw = bytearray(os.fstat(file.fileno()).st_size)
                file.readinto(raw)
        except OSError:
            return None
        return raw if hashlib.sha256(raw).hexdigest() == digest else None

    def _receive(self, name: str, path: Path, digest: str, about: Mapping[str, Any]) -> bytearray:
        size, raw = claimed_bytes(about.get("shape"), about.get("type")), bytearray()
        while len(raw) < size:
            piece = self.ask({"kind": "tensor", "name": name, "start": len(raw)})[1]
            if not piece or not len(piece[0]):
                raise ShoalError(f"the server sent only {len(raw)} of {size} bytes of {name}")
            raw += piece[0]
        self.received_bytes += len(raw)
        if hashlib.sha256(raw).hexdigest() != digest:
            raise ShoalError(f"what arrived of {name} is not what the server has: its digest differs")
        try:
            _write(path, raw)
        except OSError as error:
            raise ShoalError(f"the tensor {name} cannot be kept in {path.parent}: {error}") from None
        return raw


def _write(path: Path, raw: bytearray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Machines that share the folder may receive the same tensor at once
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        partial.write_bytes(raw)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path, key: str) -> Tensor:
    """Memory-mapped: pages that are not touched take no memory."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(key)
    return tensor


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
