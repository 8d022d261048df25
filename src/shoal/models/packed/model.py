"""A model whose matrices are packed one by one as they are read, so that no more than one is in memory in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.freed_memory import return_freed_memory
from shoal.models.packed.compiled_blocks import CompiledBlocks
from shoal.models.packed.formats import HALF, PackedShape, packed
from shoal.models.packed.layers import arranged, layer_kind, pack_layers
from shoal.models.stages import load_tensors, required_tensors

Get = Callable[[str], Tensor]
"""Gets a tensor by its name in the model."""


class PackedModel:
    """The structure of a model with packed layers, and its tensors."""

    def __init__(self, make: Callable[[], Any], get: Get, kinds: Mapping[str, str], packs: bool = True) -> None:
        """`make`: the model without weights; `kinds`: of its packed layers, by the names of their weights; `packs`: `get` gets plain
        tensors, which are packed here."""
        self._make, self._get, self.kinds, self._packs = make, get, dict(kinds), packs
        self.shapes: dict[str, PackedShape] = {}
        self.names = frozenset(required_tensors(self.make()))

    def make(self) -> Any:
        """The model without weights."""
        made = self._make()
        self.shapes = pack_layers(made, lambda name, layer: self.kinds.get(name))
        made.packed_blocks = CompiledBlocks().through
        return made

    def get(self, name: str) -> Tensor:
        """The packed bytes of a matrix, or any other tensor in float32."""
        tensor, shape = self._get(name), self.shapes.get(name)
        if shape is None:
            return tensor.float() if tensor.is_floating_point() else tensor
        return packed(tensor, shape.kind) if self._packs else tensor

    def getter(self, device: torch.device) -> Get:
        """Gets tensors as the layers read them on a device."""
        return arranged(self.get, self.shapes, device)

    def load(self, device: torch.device) -> Any:
        """The model with its weights."""
        made, get = self.make(), self.getter(device)
        load_tensors(made, {name: get(name) for name in required_tensors(made)})
        return_freed_memory()
        return made.to(device).eval()


def kinds_of(model: nn.Module, weights: str, stored: Callable[[str], str | None]) -> dict[str, str]:
    """The kind of each layer of a model without weights, by the name of its weight, for `serving.weights`. `stored`: the kind in which a
    tensor is stored; None: float32 or another type that is not packed."""
    found: dict[str, str] = {}

    def kind_of(name: str, layer: nn.Module) -> str | None:
        as_stored = weights == "auto" or weights == stored(name)
        kind = stored(name) if as_stored else None if weights == "fp32" else layer_kind(name, layer, weights)
        if kind is not None:
            found[name] = kind
        return None

    pack_layers(model, kind_of)
    return found


def joint_kind(kinds: set[str | None]) -> str | None:
    """The kind of a matrix that is made of several."""
    if len(kinds) == 1:
        return kinds.pop()
    return None if None in kinds or kinds & set(HALF) else "int8"


def stored_kind(dtype: torch.dtype | None) -> str | None:
    return next((kind for kind, half in HALF.items() if half == dtype), None)
