"""The blocks of a network, at which it can be sharded or split."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: the items of its outermost module lists."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child.children()) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found
