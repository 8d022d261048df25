"""Models and stages of models that are made without weights, and get their weights by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shoal.errors import ShoalError

_ONE_AT_A_TIME = threading.RLock()
_INITIALISERS = ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_", "xavier_uniform_", "zeros_", "ones_", "constant_")


@contextmanager
def without_weights() -> Iterator[None]:
    """Context in which new modules get parameters on the meta device, which take no memory; their buffers are real. They are not
    initialised: torch would import its compiler to draw no numbers."""
    with _ONE_AT_A_TIME:
        original: Callable[..., None] = nn.Module.register_parameter
        own = threading.get_ident()

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            original(module, name, parameter)
            # A tied parameter is registered twice, and must stay one; other threads may build real models meanwhile
            if parameter is not None and not parameter.is_meta and threading.get_ident() == own:
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

        initialisers = {name: getattr(nn.init, name) for name in _INITIALISERS}
        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        for name, initialise in initialisers.items():
            setattr(nn.init, name, _only_real(initialise))
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]
            for name, initialise in initialisers.items():
                setattr(nn.init, name, initialise)


def _only_real(initialise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_real(tensor: Tensor, *given: Any, **named: Any) -> Tensor:
        return tensor if tensor.is_meta else initialise(tensor, *given, **named)

    return of_real


def required_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a stage or of ends, by their names in the whole model; a tied tensor under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


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
