"""Weights of a model of transformers with the LoRA matrices of peft merged, without changing the model.

Shapes: O output, I input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.huggingface.model import HuggingFace


def base_of(model: HuggingFace) -> Any | None:
    """The model of transformers, without the wrapper of peft; None: its adapters are no plain LoRA matrices."""
    if not model.has_adapters:
        return model.inner
    inner = model.inner.get_base_model()
    layers = [module for module in inner.modules() if hasattr(module, "base_layer")]
    return inner if all(_is_plain(layer) for layer in layers) else None


def _is_plain(layer: Any) -> bool:
    dora: dict[str, bool] = getattr(layer, "use_dora", None) or {}
    return isinstance(layer.base_layer, nn.Module) and hasattr(layer, "get_delta_weight") and not any(dora.values())


@torch.no_grad()
def merged_weight(module: Any, name: str) -> Tensor:
    """A tensor of a module by its name, with the products of the active LoRA matrices added to a weight."""
    base = getattr(module, "base_layer", module)
    value: Tensor = getattr(base, name)
    if name != "weight":
        return value
    if base is not module and not module.disable_adapters:
        for adapter in module.active_adapters:
            if adapter in module.lora_A:
                value = value.float() + module.get_delta_weight(adapter).float()
    return value.t() if getattr(base, "turned", False) else value  # stored in few bits, as a matrix [O, I] in place of [I, O]
