"""Functions that torch.compile must not compile.

`torch.compiler.disable` imports the compiler at definition time, which costs every process seconds, and few runs compile anything. Here
functions are only marked, and the compiler is imported when something is to be compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_called: list[tuple[list[Callable[..., Any]], Callable[..., Any]]] = []
"""For each marked function: what is called in its place now, and the function itself."""


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: the function runs uncompiled, also where its caller is compiled."""
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
