"""The weights of a model of transformers with its LoRA adapters merged, in float32, each computed when it is read.

Holds: the model is unchanged afterwards; between two tensors nothing is kept, so that a model is written with the memory of a few layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.models.huggingface.frozen_weights import FrozenEmbedding, FrozenLinear, plain_layer
from shoal.models.stages import load_tensors, required_tensors, without_weights
from shoal.untrusted.huggingface import causal_model_of

Read = Callable[[], Tensor]
_UNREAD: set[Any] = {Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.untyped_storage, Tensor.dim, Tensor.size}
_UNREAD |= {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "is_meta", "layout")}
"""Functions that need the shape of a tensor and none of its values."""


class UnreadTensor(Tensor):
    """A tensor on the device meta that is computed when an operation needs its values. Each operation computes it anew."""

    read: Read

    @classmethod
    def like(cls, shape: torch.Size, read: Read) -> UnreadTensor:
        made = torch.empty(shape, device="meta").as_subclass(cls)
        made.read = read
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNREAD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda one: one.read() if isinstance(one, UnreadTensor) else one, (args, kwargs or {}))
        return func(*args, **kwargs)


def without_adapters(inner: Any) -> tuple[Any, dict[str, Read]]:
    """The model of transformers that a model is without its adapters of peft, without weights, and functions that give these by name; of
    tied weights the first."""
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    with without_weights():
        made: Any = causal_model_of(base.config)
    made.train(base.training).generation_config = base.generation_config
    if (conversions := getattr(base, "_weight_conversions", None)) is not None:
        made._weight_conversions = conversions  # the names that the model's own files have
    return made, {name: _reader(base, name) for name in required_tensors(made)}


def merged(inner: Any) -> Any:
    """The whole model, with adapters merged."""
    made, readers = without_adapters(inner)
    load_tensors(made, {name: read() for name, read in readers.items()})
    return made


def unread(model: Any, readers: dict[str, Read]) -> dict[str, Tensor]:
    """The weights of a model by name, not yet read."""
    shapes = {name: value.shape for name, value in required_tensors(model).items()}
    return {name: UnreadTensor.like(shapes[name], read) for name, read in readers.items()}


def _reader(base: nn.Module, name: str) -> Read:
    place, _, leaf = name.rpartition(".")
    return lambda: _tensor(base.get_submodule(place), leaf).detach().float()


def _tensor(module: Any, leaf: str) -> Tensor:
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = isinstance(module, BaseTunerLayer)
    layer: Any = module.get_base_layer() if adapted else module
    if leaf != "weight":
        found: Tensor = getattr(layer, leaf)
        return found
    weight = _merged_weight(module, layer) if adapted else layer.weight
    return weight.t().contiguous() if isinstance(layer, FrozenLinear) and layer.turned else weight


def _merged_weight(module: Any, layer: Any) -> Tensor:
    """The weight of a layer with its adapters, as peft merges them into a copy of the layer."""
    if isinstance(layer, FrozenLinear | FrozenEmbedding):
        made: Any = plain_layer(layer)
    else:
        made = copy.copy(layer)
        made._parameters = dict(layer._parameters)
        made.weight = nn.Parameter(layer.weight.detach().float().clone(), requires_grad=False)
    module.base_layer = made
    try:
        module.merge()
    finally:
        module.base_layer = layer
        module.merged_adapters.clear()
    weight: Tensor = made.weight
    return weight
