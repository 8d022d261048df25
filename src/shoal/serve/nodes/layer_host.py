"""What one machine does for a model that is served: it holds layers, and the caches of requests in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.engines.single import free_memory
from shoal.errors import ShoalError
from shoal.models.kernels.cpu_packing import pack_matrices
from shoal.models.split_model import make_stage
from shoal.models.stages import ModelStage, load_tensors, required_tensors
from shoal.serve.kv_caches import KvCaches

_SHARE_OF_MEMORY = 0.8
_UNKNOWN_MEMORY = 4 << 30
"""Bytes that count as free where the system does not report them."""
_MEASURED = 8
"""Tokens that a layer is measured with."""


class LayerRange(NamedTuple):
    """The layers [first, last)."""

    first: int
    last: int


class LoadedLayers(NamedTuple):
    """Layers that are here, and the caches of their requests."""

    stage: ModelStage
    caches: KvCaches


class TokenBatch(NamedTuple):
    """Tokens that some layers read."""

    requests: Sequence[int]
    positions: Sequence[int]
    """Of the first of these tokens, in each request."""
    ids: Sequence[Sequence[int]]

    def select(self, rows: Sequence[int]) -> TokenBatch:
        """The same tokens of some of the requests."""
        requests, positions, ids = self
        return TokenBatch(tuple(requests[i] for i in rows), tuple(positions[i] for i in rows), tuple(ids[i] for i in rows))


class LayerHost:
    """The layers that are here. A machine may hold overlapping ones while requests move from one split to the next."""

    def __init__(self, skeleton: Callable[[], Any], tensor: Callable[[str], Tensor], device: torch.device, slowdown: float = 1.0) -> None:
        """`skeleton` makes the model without numbers, or is the model itself; `tensor` gets one by name."""
        self.skeleton, self.tensor, self.device, self.slowdown = skeleton, tensor, device, slowdown
        self.held: dict[LayerRange, LoadedLayers] = {}
        self._tensors: dict[str, Tensor] = {}

    def hold(self, place: LayerRange) -> int:
        """Load layers, unless they are here. Return how many parameters they have. Whatever goes wrong, nothing of them stays."""
        if place not in self.held:
            try:
                self.held[place] = self._load(place)
            except Exception:
                self.drop(place)
                raise
        return sum(parameter.numel() for parameter in self.held[place].stage.parameters())

    def _load(self, place: LayerRange) -> LoadedLayers:
        stage = make_stage(self.skeleton(), *place).eval()
        if any(parameter.is_meta for parameter in stage.parameters()):
            load_tensors(stage, {name: self._loaded(name, like) for name, like in required_tensors(stage).items()})
        stage.to(self.device)
        pack_matrices(stage, memory_for_layers(self.device))
        return LoadedLayers(stage, KvCaches(stage.new_cache, stage.joins_rows, self.device))

    def _loaded(self, name: str, like: Tensor) -> Tensor:
        if name not in self._tensors:
            tensor = self.tensor(name)
            self._tensors[name] = tensor.to(like.dtype) if like.is_floating_point() else tensor
        return self._tensors[name]

    def drop(self, place: LayerRange) -> None:
        self.held.pop(place, None)
        names = {name for held in self.held.values() for name in required_tensors(held.stage)}
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in names}

    @torch.inference_mode()
    def copy_prefix(self, place: LayerRange, request: int, other: int, length: int) -> None:
        """A request begins with the first tokens of another's cache. Raises ShoalError where they are not here."""
        caches = self.held[place].caches
        if caches.length(other) < length:
            raise ShoalError(f"request {request} begins with {length} tokens of {other}, and the caches here hold {caches.length(other)}")
        caches.copy_prefix(request, other, length)

    def release(self, requests: Sequence[int]) -> None:
        for held in self.held.values():
            for request in requests:
                held.caches.release(request)

    @torch.inference_mode()
    def read(self, place: LayerRange, reading: TokenBatch, x_BLD: Tensor) -> Tensor:
        """The stream after these layers. Caches that hold more than the position says forget the rest. Raises ShoalError."""
        start = time.perf_counter()
        held = self.held[place]
        for request, position in zip(reading.requests, reading.positions, strict=True):
            if held.caches.length(request) < position:
                raise ShoalError(f"request {request} is at token {position}, and the caches here hold {held.caches.length(request)}")
            held.caches.rewind(request, position)
        y_BLD = self._through(held, reading, x_BLD.to(self.device))
        if self.slowdown > 1:
            time.sleep((self.slowdown - 1) * (time.perf_counter() - start))
        return y_BLD

    def _through(self, held: LoadedLayers, reading: TokenBatch, x_BLD: Tensor) -> Tensor:
        ids_BL = torch.tensor(reading.ids, device=self.device)
        if len(reading.requests) > 1 and held.caches.joins:
            cache, mask_BS = held.caches.of_several(reading.requests, ids_BL.shape[1])
            joined: Tensor = held.stage(x_BLD, ids_BL, cache=cache, attention_mask=mask_BS)
            return joined
        rows = []
        for i, request in enumerate(reading.requests):
            cache = held.caches.of_one(request, ids_BL.shape[1])
            rows.append(held.stage(x_BLD[i : i + 1], ids_BL[i : i + 1], cache=cache))
        return torch.cat(rows)

    def measure(self, width: int, rows: int = 1) -> float:
        """Seconds that this machine takes for one token of so many requests in one layer."""
        place, requests = LayerRange(0, 1), [-1 - row for row in range(rows)]
        self.hold(place)
        x_BLD = torch.zeros(rows, 1, width, dtype=next(iter(required_tensors(self.held[place].stage).values())).dtype)
        taken = []
        for position in range(_MEASURED):
            start = time.perf_counter()
            self.read(place, TokenBatch(requests, [position] * rows, [[0]] * rows), x_BLD).cpu()  # a GPU is waited for
            taken.append(time.perf_counter() - start)
        self.release(requests)
        return min(taken)


def memory_for_layers(device: torch.device) -> int:
    """Bytes that weights and caches may take on a device."""
    return int((free_memory(device) or _UNKNOWN_MEMORY) * _SHARE_OF_MEMORY)
