"""Where a network can be cut."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: what stands in lists, the outermost."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child.children()) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found
