"""What every model in pieces shares, and how pieces without numbers are made and filled.

Shapes: B batch, L tokens, S tokens seen (L and those in the cache), D width, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.models.trunk import Beside

_ONE_AT_A_TIME = threading.RLock()


class Stage(nn.Module):
    """The layers [first, last) of a model."""

    joins_rows = True
    """Whether the caches of several requests can be joined into one."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(
        self, x_BLD: Tensor, input_ids_BL: Tensor, *, cache: Any = None, attention_mask: Tensor | None = None, beside: Beside | None = None
    ) -> Tensor:
        """The stream after these layers. `attention_mask` [B, S] is 0 at padding, the tokens in the cache counted; `beside` takes up what
        these layers tell: losses count by their share of all layers."""
        raise NotImplementedError

    def new_cache(self, capacity: int) -> Any:
        """Room for the keys and values of so many tokens in these layers; it grows where there are more."""
        raise NotImplementedError

    def gradient_checkpointing(self, enabled: bool) -> None:
        """Whether the backward pass computes activations again instead of keeping them."""
        raise NotImplementedError


class Ends(nn.Module):
    """What comes before the first layer (`entry`) and after the last (`exit`): either, or both."""

    vocab_size: int
    max_seq_len: int | None

    def __init__(self, entry: bool, after: bool) -> None:
        super().__init__()
        self.entry, self.exit = entry, after

    def embed(self, input_ids_BL: Tensor, past: int = 0, attention_mask: Tensor | None = None) -> Tensor:
        """The stream before the first layer. `past`: tokens in the cache."""
        raise NotImplementedError

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Logits [B, L, V] of the stream after the last layer."""
        raise NotImplementedError


@contextmanager
def skeleton() -> Iterator[None]:
    """Models that are made meanwhile have parameters without numbers, which take no memory; their buffers are real."""
    with _ONE_AT_A_TIME:
        original: Callable[..., None] = nn.Module.register_parameter
        own = threading.get_ident()

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            original(module, name, parameter)
            # A tied parameter is registered twice, and must stay one; and other threads make models with numbers meanwhile
            if parameter is not None and not parameter.is_meta and threading.get_ident() == own:
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


def needed(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that must be put into a stage or into ends, by their names in the whole model; of tied ones the first name."""
    seen: set[int] = set()
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors into a stage or into ends that was made as a skeleton. They are not copied. Raises ShoalError."""
    homes: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for owner in module.modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for name, tensor in table.items():
                homes.setdefault(id(tensor), []).append((table, name))
    for name, tensor in needed(module).items():
        given = tensors.get(name)
        if given is None or given.shape != tensor.shape:
            what = "is missing" if given is None else f"has the shape {tuple(given.shape)} instead of {tuple(tensor.shape)}"
            raise ShoalError(f"the tensor {name} of the model {what}")
        made = nn.Parameter(given, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else given
        for table, key in homes[id(tensor)]:
            table[key] = made
