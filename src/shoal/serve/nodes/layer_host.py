"""The layers of a served model that one machine holds, and the caches of requests in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.engines.single import free_memory
from shoal.errors import ShoalError
from shoal.freed_memory import return_freed_memory
from shoal.models.kernels.cpu_packing import pack_matrices
from shoal.models.packed.layers import number_count
from shoal.models.split_model import ModelStage, make_stage
from shoal.models.stages import load_tensors, required_tensors
from shoal.serve.batched_kv_caches import KvCaches

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
    """Loaded layers, and the caches of their requests."""

    stage: ModelStage
    caches: KvCaches


class TokenBatch(NamedTuple):
    """Tokens that some layers read."""

    requests: Sequence[int]
    positions: Sequence[int]
    """Of the first of these tokens in each request."""
    ids: Sequence[Sequence[int]]

    def select(self, rows: Sequence[int]) -> TokenBatch:
        """The same tokens of some of the requests."""
        requests, positions, ids = self
        return TokenBatch(tuple(requests[i] for i in rows), tuple(positions[i] for i in rows), tuple(ids[i] for i in rows))


class LayerHost:
    """The loaded layers. They may overlap while requests move from one split to the next."""

    def __init__(self, skeleton: Callable[[], Any], tensor: Callable[[str], Tensor], device: torch.device, slowdown: float = 1.0) -> None:
        """`skeleton` makes the model without weights, or returns the model itself; `tensor` gets a weight by name."""
        self.skeleton, self.tensor, self.device, self.slowdown = skeleton, tensor, device, slowdown
        self.loaded: dict[LayerRange, LoadedLayers] = {}
        self._tensors: dict[str, Tensor] = {}

    def load(self, layers: LayerRange) -> int:
        """Load layers, unless they are loaded. Return their number of parameters. After an error nothing of them stays in memory."""
        if layers not in self.loaded:
            try:
                self.loaded[layers] = self._make_layers(layers)
            except Exception:
                self.drop(layers)
                raise
        return number_count(self.loaded[layers].stage)

    def _make_layers(self, layers: LayerRange) -> LoadedLayers:
        stage = make_stage(self.skeleton(), *layers).eval()
        if any(parameter.is_meta for parameter in stage.parameters()):
            load_tensors(stage, {name: self._loaded(name) for name in required_tensors(stage)})
            return_freed_memory()
        stage.to(self.device)
        pack_matrices(stage, memory_for_layers(self.device))
        return LoadedLayers(stage, KvCaches(stage.new_cache, stage.joins_rows, self.device))

    def _loaded(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = self.tensor(name)
        return self._tensors[name]

    def drop(self, layers: LayerRange) -> None:
        self.loaded.pop(layers, None)
        names = {name for loaded in self.loaded.values() for name in required_tensors(loaded.stage)}
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in names}
        return_freed_memory()

    @torch.inference_mode()
    def copy_prefix(self, layers: LayerRange, request: int, other: int, length: int) -> None:
        """Begin a request with the first tokens of another's cache. Raises ShoalError where the cache has fewer."""
        caches = self.loaded[layers].caches
        if caches.length(other) < length:
            raise ShoalError(f"request {request} begins with {length} tokens of {other}, and the caches here hold {caches.length(other)}")
        caches.copy_prefix(request, other, length)

    def release(self, requests: Sequence[int]) -> None:
        for loaded in self.loaded.values():
            for request in requests:
                loaded.caches.release(request)

    @torch.inference_mode()
    def read(self, layers: LayerRange, token_batch: TokenBatch, x_BLD: Tensor) -> Tensor:
        """The hidden states after these layers. Caches with tokens beyond the position are rewound. Raises ShoalError."""
        start = time.perf_counter()
        loaded = self.loaded[layers]
        for request, position in zip(token_batch.requests, token_batch.positions, strict=True):
            if loaded.caches.length(request) < position:
                raise ShoalError(f"request {request} is at token {position}, and the caches here hold {loaded.caches.length(request)}")
            loaded.caches.rewind(request, position)
        y_BLD = self._through(loaded, token_batch, x_BLD.to(self.device))
        if self.slowdown > 1:
            time.sleep((self.slowdown - 1) * (time.perf_counter() - start))
        return y_BLD

    def _through(self, loaded: LoadedLayers, token_batch: TokenBatch, x_BLD: Tensor) -> Tensor:
        ids_BL = torch.tensor(token_batch.ids, device=self.device)
        if len(token_batch.requests) > 1 and loaded.caches.joins:
            cache, mask_BS = loaded.caches.of_several(token_batch.requests, ids_BL.shape[1])
            return loaded.stage.through(x_BLD, ids_BL, cache=cache, attention_mask=mask_BS)
        rows = []
        for i, request in enumerate(token_batch.requests):
            cache = loaded.caches.of_one(request, ids_BL.shape[1])
            rows.append(loaded.stage.through(x_BLD[i : i + 1], ids_BL[i : i + 1], cache=cache))
        return torch.cat(rows)

    @torch.inference_mode()
    def recompute(self, layers: LayerRange, ids: Sequence[int], x_1LD: Tensor) -> Tensor:
        """The hidden states of one text after these layers, from its first token. The layers are loaded one after the other, so that there
        need be memory for one only."""
        ids_1L, y_1LD = torch.tensor([ids], device=self.device), x_1LD.to(self.device)
        for first in range(layers.first, layers.last):
            layer = make_stage(self.skeleton(), first, first + 1).eval()
            empty = required_tensors(layer) if any(parameter.is_meta for parameter in layer.parameters()) else {}
            try:
                if empty:
                    load_tensors(layer, {name: self.tensor(name) for name in empty})
                cache: Any = layer.new_cache(0)
                y_1LD = layer.to(self.device).through(y_1LD, ids_1L, cache=cache)
            finally:
                if empty:
                    load_tensors(layer, empty)
        return y_1LD

    def measure(self, width: int, rows: int = 1) -> float:
        """Seconds that this machine takes for one token of each of `rows` requests in one layer."""
        layers, requests = LayerRange(0, 1), [-1 - row for row in range(rows)]
        self.load(layers)
        x_BLD = torch.zeros(rows, 1, width, dtype=next(iter(required_tensors(self.loaded[layers].stage).values())).dtype)
        taken = []
        for position in range(_MEASURED):
            start = time.perf_counter()
            self.read(layers, TokenBatch(requests, [position] * rows, [[0]] * rows), x_BLD).cpu()  # waits for a GPU
            taken.append(time.perf_counter() - start)
        self.release(requests)
        return min(taken)


def memory_for_layers(device: torch.device) -> int:
    """Bytes that weights and caches may take on a device."""
    return int((free_memory(device) or _UNKNOWN_MEMORY) * _SHARE_OF_MEMORY)
