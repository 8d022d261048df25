"""Stages of a language model, whether it is a transformer of Shoal's own or one of Hugging Face: a stage holds consecutive layers, and the
ends hold everything before and after the layers.

The parameters of a stage have the names that they have in the whole model, so a checkpoint is always that of the whole model. Hidden
states pass from one stage to the next; token ids, a mask and a KV cache go beside them to every stage that needs them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.errors import ShoalError
from shoal.models.huggingface.stages import HuggingFaceEnds, HuggingFaceStage, layers_of
from shoal.models.transformer import Trunk

ModelStage = Trunk | HuggingFaceStage
ModelEnds = Trunk | HuggingFaceEnds


def layer_count(model: Any) -> int:
    """How many layers can be put onto different machines. Raises ShoalError for a model that cannot be cut."""
    if isinstance(model, Trunk) and model.reader is None and model.memory is None:
        return len(model.blocks)
    if hasattr(model, "inner"):
        return len(layers_of(model.inner))
    why = " that reads passages, a context or its memory" if isinstance(model, Trunk) else ""
    raise ShoalError(f"a {type(model).__name__}{why} cannot be cut into stages; model.kind gpt, moe and huggingface can")


def make_stage(model: Any, first: int, last: int) -> ModelStage:
    """The layers [first, last) of a model, with the model's own parameters."""
    if not 0 <= first < last <= layer_count(model):
        raise ShoalError(f"a stage cannot have the layers {first} to {last - 1}: the model has {layer_count(model)}")
    if isinstance(model, Trunk):
        return model.only(first, last)
    return HuggingFaceStage(model, first, last)


def make_ends(model: Any, *, before: bool = True, after: bool = True) -> ModelEnds:
    """What stands before and after the layers of a model, or one of them, with the model's own parameters."""
    layer_count(model)  # raises for a model that cannot be cut
    if isinstance(model, Trunk):
        return model.ends(before, after)
    return HuggingFaceEnds(model, before, after)


def layer_modules(model: Any) -> list[nn.Module]:
    """The layers of a model."""
    return list(model.blocks if isinstance(model, Trunk) else layers_of(model.inner))
