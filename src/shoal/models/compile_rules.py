"""Which functions torch's compiler leaves alone.

`torch.compiler.disable` imports the compiler where a function is defined. That takes seconds of every process, and few runs compile
anything: here the compiler is told when there is something to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_called: list[tuple[list[Callable[..., Any]], Callable[..., Any]]] = []
"""For each function that is left alone: what is called for it now, and the function itself."""


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """A function that runs as it is written, also where what calls it is compiled."""
    current: list[Callable[P, T]] = [function]
    _called.append((current, function))

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        return current[0](*arguments, **named)

    return call


def exclude_from_compilation() -> None:
    """Call this before anything is compiled."""
    for current, function in _called:
        current[0] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
