"""Checkpoints, and their nested state as JSON-able data and named tensors, for JSON and safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from torch import Tensor


class Checkpoint(NamedTuple):
    """The content of a checkpoint or a snapshot, and its folder or its place in a database."""

    path: PurePath
    step: int
    weights: Mapping[str, Tensor]
    state: dict[str, Any]

    @property
    def weights_to_use(self) -> Mapping[str, Tensor]:
        """The weights, with the moving average of those that a run averages in their place. A run goes on with `weights`."""
        average = self.state.get("engine", {}).get("average")
        return self.weights if average is None else {**self.weights, **average["weights"]}


def packed(value: Any, name: str, tensors: dict[str, Tensor], copy: bool = True) -> Any:
    """Nested data with each tensor replaced by its name in `tensors`, which gets a copy unless `copy` is false. Numeric keys stay numbers.

    A tensor on the device `meta` stands for one that another process writes under this name.
    """
    if isinstance(value, Tensor):
        if not value.is_meta:
            tensors[name] = value.clone() if copy else value
        return {"$tensor": name}
    if isinstance(value, dict):
        return {"$items": [[key, packed(item, f"{name}.{key}", tensors, copy)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [packed(item, f"{name}.{i}", tensors, copy) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    return value


def unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, list):
        return [unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(unpacked(item, tensors) for item in value["$tuple"])
    return {key: unpacked(item, tensors) for key, item in value["$items"]}
