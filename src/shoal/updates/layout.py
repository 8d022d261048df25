"""Flat parameters: one contiguous vector for a network's parameters, one for its gradients, and the layout of both."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Slot(NamedTuple):
    """Position of one tensor in the vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class ParameterLayout:
    """The names, shapes and offsets of the tensors in a vector."""

    def __init__(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        self.slots: list[Slot] = []
        self.size = 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), self.size)
            self.slots.append(slot)
            self.size += slot.size

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of a vector; they share its memory."""
        for slot in self.slots:
            yield slot.name, vector[slot.offset : slot.offset + slot.size].view(slot.shape)


def flatten_networks(networks: Mapping[str, nn.Module]) -> tuple[Tensor, Tensor, dict[str, FlatNetwork]]:
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

    An element-wise optimizer can step the whole vector at once, and an update is one tensor to send. A network that computes in bfloat16
    may read its parameters from `shadow`, a rounded copy of the vector: see `cast_shadow`.
    """

    def __init__(self, network: nn.Module, vector: Tensor | None = None, gradient: Tensor | None = None) -> None:
        """`vector` and `gradient`: views of longer vectors to use; None: allocate them."""
        self.network = network
        parameters = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        self.parameters = list(parameters.values())
        self.masters = self.parameters
        """What the optimizer steps: float32 views of the vector."""
        self.shadow: Tensor | None = None
        self.layout = ParameterLayout((name, tuple(parameter.shape)) for name, parameter in parameters.items())
        first = self.parameters[0]
        self.vector = torch.empty(self.layout.size, dtype=first.dtype, device=first.device) if vector is None else vector
        self.gradient = torch.zeros_like(self.vector) if gradient is None else gradient
        self.slopes = [view for _, view in self.layout.views(self.gradient)]
        self.gathered = False
        """Whether the gradient is in `gradient`; else it is still in the parameters' `grad`."""
        self.summed = False
        """Whether `gradient` holds the sum of earlier passes of this step."""
        with torch.no_grad():
            for (_, view), parameter in zip(self.layout.views(self.vector), self.parameters, strict=True):
                view.copy_(parameter)
                parameter.data = view

    # --- the shadow --------------------------------------------------------------------------------

    def cast_shadow(self, names: Collection[str]) -> None:
        """Make the network read these parameters from a bfloat16 copy. Holds: after `renew_shadow`, shadow = bfloat16(vector)."""
        self.shadow = torch.empty_like(self.vector, dtype=torch.bfloat16)
        self.renew_shadow()
        self.masters = [nn.Parameter(view) for _, view in self.layout.views(self.vector)]
        for (name, view), parameter in zip(self.layout.views(self.shadow), self.parameters, strict=True):
            if name in names:
                parameter.data = view

    def renew_shadow(self) -> None:
        """Copy the vector to the shadow; call it after every write to the vector."""
        if self.shadow is not None:
            self.shadow.copy_(self.vector)

    def drop_shadow(self) -> None:
        """Make the network read the vector itself again."""
        self.forget_gradients()
        for (_, view), parameter in zip(self.layout.views(self.vector), self.parameters, strict=True):
            parameter.data = view
        self.shadow, self.masters = None, self.parameters

    # --- gradients ---------------------------------------------------------------------------------

    def offer_room(self) -> None:
        """Let passes write gradients where they will be gathered: each is moved there as soon as it is complete, so that no copy of it
        stays in memory, and hand-written backward passes can write theirs there in a step's first pass. Only for passes whose backward
        ends before the next forward begins. Gradients of a shadow are of another type and move after each whole pass."""
        own = weakref.ref(self)

        def move(index: int) -> None:
            network = own()
            if network is not None:
                network.gather_one(index)

        for index, (slope, parameter) in enumerate(zip(self.slopes, self.parameters, strict=True)):
            parameter.gradient_buffer = slope  # type: ignore[attr-defined]
            if self.shadow is None:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: move(index))  # type: ignore[no-untyped-call]

    def forget_gradients(self) -> None:
        """Call before a step's first backward pass: its gradients are then stored instead of added to zeros."""
        self.gathered = self.summed = False
        for parameter in self.parameters:
            parameter.grad = None

    def sum_gradients(self) -> None:
        """Call between the backward passes of a step: add the gradients in the vector's type, since bfloat16 sums would be rounded."""
        if self.shadow is not None:  # else the parameters' own gradients are of the vector's type
            self.add_up_gradients()

    def add_up_gradients(self) -> None:
        """As `sum_gradients`, where the next pass overwrites the gradients: they are moved whatever their type."""
        self._take(range(len(self.parameters)))
        self.summed = True

    def gather_gradients(self) -> None:
        """Call after the last backward pass: move all gradients into the vector and make them the parameters' `grad`; 0 where missing."""
        if self.gathered:
            return
        if self.shadow is not None or any(one.grad is not slope for one, slope in zip(self.parameters, self.slopes, strict=True)):
            self._take(range(len(self.parameters)))
            self.attach_gradients()
        self.gathered = True

    def gather_piece(self, indices: Sequence[int]) -> None:
        """`gather_gradients` for some parameters, after the last backward pass has reached them."""
        self._take(indices)
        self._attach(indices)

    def gather_one(self, index: int) -> None:
        """`gather_piece` for one parameter: called for each of them in every step."""
        parameter, slope = self.parameters[index], self.slopes[index]
        gradient = parameter.grad
        if gradient is None or self.shadow is not None:
            return self.gather_piece([index])
        if gradient.data_ptr() != slope.data_ptr():
            slope.add_(gradient) if self.summed else slope.copy_(gradient)
            parameter.grad = slope
        elif gradient is not slope:
            parameter.grad = slope
        return None

    def attach_gradients(self) -> None:
        """Make views of the gradient vector the parameters' `grad`."""
        self._attach(range(len(self.parameters)))
        self.gathered = True

    def _attach(self, indices: Sequence[int]) -> None:
        for i in indices:
            self.parameters[i].grad = None
            self.masters[i].grad = self.slopes[i]

    def _take(self, indices: Sequence[int]) -> None:
        """Move gradients into the vector, or add them to those of earlier passes."""
        pairs = [(self.slopes[i], gradient) for i in indices if (gradient := self.parameters[i].grad) is not None]
        pairs = [(slope, gradient) for slope, gradient in pairs if slope.data_ptr() != gradient.data_ptr()]
        if self.summed:
            for slope, gradient in pairs:
                slope.add_(gradient)
        else:
            absent = [self.slopes[i] for i in indices if self.parameters[i].grad is None]
            if absent:
                torch._foreach_zero_(absent)
            if pairs:
                torch._foreach_copy_([slope for slope, _ in pairs], [gradient for _, gradient in pairs])
        if self.shadow is not None:
            for i in indices:
                self.parameters[i].grad = None

    def load(self, vector: Tensor) -> None:
        """Copy other weights into the vector."""
        self.vector.copy_(vector)
        self.renew_shadow()
