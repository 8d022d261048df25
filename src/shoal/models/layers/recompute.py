"""Activation checkpointing: a part's activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(part: nn.Module, forward: Callable[..., Any], *arguments: Any) -> Any:
    """`forward(*arguments)`, which the backward pass computes again. Holds: the second time, each module of `part` is in the mode (training
    or evaluation) of the first time. Feedback tasks compute their losses in evaluation mode and are back in training mode when the
    backward pass runs: dropout and routing would then differ."""
    evaluated = [] if part.training or torch.compiler.is_compiling() else [one for one in part.modules() if not one.training]
    if not evaluated:
        return checkpoint(forward, *arguments, use_reentrant=False)

    def modes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _evaluation_mode(evaluated)

    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=modes)


@contextmanager
def _evaluation_mode(modules: list[nn.Module]) -> Iterator[None]:
    changed = [module for module in modules if module.training]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True
