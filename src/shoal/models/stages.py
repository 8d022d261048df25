"""A language model in pieces: stages, which hold consecutive layers, and the ends, which hold everything before and after them.

The parameters of a stage have the names that they have in the whole model, so a checkpoint is the whole model's, whoever held which layers.
Hidden states pass from one stage to the next; token ids, a mask and a cache go beside them to every stage that needs them.

Shapes: B batch, L tokens, S tokens seen (L and those in the cache), D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from shoal.errors import ShoalError
from shoal.models.generation.kv_cache import KeyValueCache
from shoal.models.stage_parts import Ends, Stage, fill, needed, skeleton
from shoal.models.trunk import Beside, Trunk

__all__ = ["Ends", "Stage", "cut", "depth", "ends_of", "fill", "layer_parameters", "needed", "skeleton", "stage_of"]


class TrunkStage(Stage):
    """Layers of a transformer of Shoal's own."""

    def __init__(self, model: Trunk, first: int, last: int) -> None:
        super().__init__(first, last)
        part = model.only(first, last)
        # Not as a submodule: its own submodules are registered here instead, under the names that they have in the whole model
        self.__dict__["part"] = part
        for name, module in part.named_children():
            self.add_module(name, module)
        self.train(model.training)

    part: Trunk

    def forward(
        self, x_BLD: Tensor, input_ids_BL: Tensor, *, cache: Any = None, attention_mask: Tensor | None = None, beside: Beside | None = None
    ) -> Tensor:
        return self.part.through(x_BLD, input_ids_BL, cache=cache, attention_mask=attention_mask, beside=beside)

    def new_cache(self, capacity: int) -> KeyValueCache:
        return KeyValueCache(self.last - self.first, capacity)

    def train(self, mode: bool = True) -> TrunkStage:
        self.part.training = mode
        super().train(mode)
        return self

    def gradient_checkpointing(self, enabled: bool) -> None:
        self.part.gradient_checkpointing(enabled)


class TrunkEnds(Ends):
    """Embeddings, last normalisation and output matrix of a transformer of Shoal's own. A tied matrix is there once."""

    def __init__(self, model: Trunk, entry: bool, after: bool) -> None:
        super().__init__(entry, after)
        self.vocab_size, self.max_seq_len = model.vocab_size, model.max_seq_len
        part = model.without_layers()
        self.__dict__["part"] = part
        if entry or part.output is None:
            self.token_embedding = part.token_embedding
        if entry and part.position_embedding is not None:
            self.position_embedding = part.position_embedding
        if after:
            self.norm = part.norm
        if after and part.output is not None:
            self.output = part.output
        self.train(model.training)

    part: Trunk

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        return self.part.output is None

    def embed(self, input_ids_BL: Tensor, past: int = 0, attention_mask: Tensor | None = None) -> Tensor:
        return self.part.embed(input_ids_BL, past, attention_mask)

    def hidden(self, x_BLD: Tensor) -> Tensor:
        """What the output matrix reads."""
        hidden_BLD: Tensor = self.part.norm(x_BLD)
        return hidden_BLD

    @property
    def output_weight(self) -> Tensor:
        return self.part.output_weight

    def logits(self, x_BLD: Tensor) -> Tensor:
        return self.part.project(self.hidden(x_BLD))

    @property
    def packed_output(self) -> Any:
        return self.part.packed_output

    @packed_output.setter
    def packed_output(self, packed: Any) -> None:
        self.part.packed_output = packed

    def train(self, mode: bool = True) -> TrunkEnds:
        self.part.training = mode
        super().train(mode)
        return self


def depth(model: Any) -> int:
    """How many layers can be put onto different machines. Raises ShoalError for a model that cannot be cut."""
    if isinstance(model, Trunk) and model.reader is None and model.memory is None:
        return len(model.blocks)
    if hasattr(model, "inner"):
        from shoal.models.huggingface.stages import layers_of

        return len(layers_of(model.inner))
    why = " that reads passages, a context or its memory" if isinstance(model, Trunk) else ""
    raise ShoalError(f"a {type(model).__name__}{why} cannot be cut into stages; model.kind gpt, moe and huggingface can")


def stage_of(model: Any, first: int, last: int) -> Stage:
    """The layers [first, last) of a model, with the model's own parameters."""
    if not 0 <= first < last <= depth(model):
        raise ShoalError(f"a stage cannot have the layers {first} to {last - 1}: the model has {depth(model)}")
    if isinstance(model, Trunk):
        return TrunkStage(model, first, last)
    from shoal.models.huggingface.stages import HuggingFaceStage

    return HuggingFaceStage(model, first, last)


def ends_of(model: Any, **wanted: bool) -> Ends:
    """What is before and after the layers of a model, with the model's own parameters. `entry=False` or `exit=False` leaves one out."""
    depth(model)
    before, after = wanted.get("entry", True), wanted.get("exit", True)
    if isinstance(model, Trunk):
        return TrunkEnds(model, before, after)
    from shoal.models.huggingface.stages import HuggingFaceEnds

    return HuggingFaceEnds(model, before, after)


def cut(model: Any, bounds: Sequence[int]) -> list[Stage]:
    """The model in stages: the first has the layers [bounds[0], bounds[1]), the next go on from there."""
    if list(bounds[:1]) != [0] or bounds[-1] != depth(model):
        raise ShoalError(f"stages must begin at layer 0 and end at {depth(model)}, and these have the bounds {list(bounds)}")
    return [stage_of(model, first, last) for first, last in pairwise(bounds)]


def layer_parameters(model: Any) -> list[int]:
    """How many parameters each layer has."""
    if isinstance(model, Trunk):
        layers: Any = model.blocks
    else:
        from shoal.models.huggingface.stages import layers_of

        layers = layers_of(model.inner)
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
