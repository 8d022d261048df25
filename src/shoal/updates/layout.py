"""One contiguous vector for a network's parameters, one for its gradients, and the layout that names their parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Slot(NamedTuple):
    """Where one tensor lies in the vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


class Layout:
    """The names, shapes and offsets of the tensors in a vector."""

    def __init__(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        self.slots: list[Slot] = []
        self.size = 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), self.size)
            self.slots.append(slot)
            self.size += slot.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.slots == other.slots

    __hash__ = None  # type: ignore[assignment]

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of a vector; they share its memory."""
        for slot in self.slots:
            yield slot.name, vector[slot.offset : slot.offset + slot.size].view(slot.shape)


def lay_out(networks: Mapping[str, nn.Module]) -> tuple[Tensor, Tensor, dict[str, FlatNetwork]]:
    """One vector and one gradient for all networks together, and each network's part of them."""
    parameters = {name: [one for one in network.parameters() if one.requires_grad] for name, network in networks.items()}
    sizes = [sum(one.numel() for one in own) for own in parameters.values()]
    first = next(iter(parameters.values()))[0]
    vector = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    gradient = torch.zeros_like(vector)
    parts = zip(networks.items(), torch.split(vector, sizes), torch.split(gradient, sizes), strict=True)
    return vector, gradient, {name: FlatNetwork(network, own, slope) for (name, network), own, slope in parts}


class FlatNetwork:
    """A network whose parameters are views of `vector`, and whose gradients are gathered in `gradient`.

    An optimizer that works element by element can step the whole vector at once, and an update is one tensor to send.
    """

    def __init__(self, network: nn.Module, vector: Tensor | None = None, gradient: Tensor | None = None) -> None:
        """`vector` and `gradient`: where to put them, as parts of longer ones; None: of their own."""
        self.network = network
        parameters = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        self.parameters = list(parameters.values())
        self.layout = Layout((name, tuple(parameter.shape)) for name, parameter in parameters.items())
        first = self.parameters[0]
        self.vector = torch.empty(self.layout.size, dtype=first.dtype, device=first.device) if vector is None else vector
        self.gradient = torch.zeros_like(self.vector) if gradient is None else gradient
        self.slopes = [view for _, view in self.layout.views(self.gradient)]
        with torch.no_grad():
            for (_, view), parameter in zip(self.layout.views(self.vector), self.parameters, strict=True):
                view.copy_(parameter)
                parameter.data = view

    def forget_gradients(self) -> None:
        """Before a backward pass: the first gradient is then stored instead of added to zeros."""
        for parameter in self.parameters:
            parameter.grad = None

    def gather_gradients(self) -> None:
        """After it: all gradients into the vector, where from now on the parameters' own `grad` is; 0 for a parameter without."""
        there = [
            (slope, parameter.grad) for slope, parameter in zip(self.slopes, self.parameters, strict=True) if parameter.grad is not None
        ]
        if len(there) < len(self.slopes):
            self.gradient.zero_()
        if there:
            torch._foreach_copy_([slope for slope, _ in there], [gradient for _, gradient in there])
        self.attach_gradients()

    def attach_gradients(self) -> None:
        """Make the parts of the gradient vector the parameters' own gradients."""
        for slope, parameter in zip(self.slopes, self.parameters, strict=True):
            parameter.grad = slope

    def load(self, vector: Tensor) -> None:
        """Take over other weights."""
        self.vector.copy_(vector)
