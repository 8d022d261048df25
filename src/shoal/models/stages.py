"""Stages of a language model: a stage holds consecutive layers, and the ends hold everything before and after the layers.

The parameters of a stage have the names that they have in the whole model, so a checkpoint is always that of the whole model. Hidden
states pass from one stage to the next; token ids, a mask and a KV cache go beside them to every stage that needs them.

Shapes: B batch, L tokens, S tokens seen (L and those in the cache), D width, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.generation.kv_cache import KeyValueCache
from shoal.models.trunk import SideChannel, Trunk

_ONE_AT_A_TIME = threading.RLock()


class ModelStage(nn.Module):
    """The layers [first, last) of a model."""

    joins_rows = True
    """Whether the caches of several requests can be joined into one."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(
        self,
        x_BLD: Tensor,
        input_ids_BL: Tensor,
        *,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        beside: SideChannel | None = None,
    ) -> Tensor:
        """The residual stream after these layers. `attention_mask` [B, S] is 0 at padding and covers the tokens in the cache. `beside`
        collects the side outputs; losses are scaled by the share of all layers."""
        raise NotImplementedError

    def new_cache(self, capacity: int) -> Any:
        """A KV cache of these layers for `capacity` tokens; it grows as needed."""
        raise NotImplementedError

    def gradient_checkpointing(self, enabled: bool) -> None:
        """Whether the backward pass computes activations again instead of keeping them."""
        raise NotImplementedError


class ModelEnds(nn.Module):
    """What stands before the first layer (`entry`) and after the last (`exit`): either, or both."""

    vocab_size: int
    max_seq_len: int | None

    def __init__(self, entry: bool, after: bool) -> None:
        super().__init__()
        self.entry, self.exit = entry, after

    def embed(self, input_ids_BL: Tensor, past: int = 0, attention_mask: Tensor | None = None) -> Tensor:
        """The residual stream before the first layer. `past`: tokens in the cache."""
        raise NotImplementedError

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Logits [B, L, V] from the residual stream after the last layer."""
        raise NotImplementedError


class TrunkStage(ModelStage):
    """Layers of one of Shoal's own transformers."""

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
        self,
        x_BLD: Tensor,
        input_ids_BL: Tensor,
        *,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        beside: SideChannel | None = None,
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


class TrunkEnds(ModelEnds):
    """Embeddings, last normalisation and output matrix of one of Shoal's own transformers. A tied matrix is present once."""

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
        """Input of the output matrix."""
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


@contextmanager
def without_weights() -> Iterator[None]:
    """Context in which new modules get parameters on the meta device, which take no memory; their buffers are real."""
    with _ONE_AT_A_TIME:
        original: Callable[..., None] = nn.Module.register_parameter
        own = threading.get_ident()

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            original(module, name, parameter)
            # A tied parameter is registered twice, and must stay one; other threads may build real models meanwhile
            if parameter is not None and not parameter.is_meta and threading.get_ident() == own:
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


def required_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a stage or of ends, by their names in the whole model; a tied tensor under its first name."""
    seen: set[int] = set()
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors into a module made with `without_weights`. They are not copied. Raises ShoalError."""
    slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for owner in module.modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for name, tensor in table.items():
                slots.setdefault(id(tensor), []).append((table, name))
    for name, tensor in required_tensors(module).items():
        given = tensors.get(name)
        if given is None or given.shape != tensor.shape:
            what = "is missing" if given is None else f"has the shape {tuple(given.shape)} instead of {tuple(tensor.shape)}"
            raise ShoalError(f"the tensor {name} of the model {what}")
        made = nn.Parameter(given, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else given
        for table, key in slots[id(tensor)]:
            table[key] = made
