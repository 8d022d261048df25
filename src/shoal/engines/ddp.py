"""Data-parallel engine: each process has a copy of the networks. Gradients are summed in buckets, each as soon as the backward pass has
filled it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config import Run
from shoal.engines.single import SingleEngine
from shoal.engines.world import World
from shoal.tasks import Task
from shoal.updates.layout import FlatNetwork

_FIRST_BYTES, _PIECE_BYTES = 1 << 20, 25 << 20
"""Bucket sizes of PyTorch's DistributedDataParallel: the first one is small, so that sending begins early."""


class DdpEngine(SingleEngine):
    """Each batch counts by its share of all processes' batches, so the sum of the gradients is the mean over all that counts."""

    def __init__(self, run: Run, task: Task, device: torch.device, total_steps: int, world: World) -> None:
        super().__init__(run, task, device, total_steps, world, learns=True)
        self.reducers = {name: GradientReducer(network) for name, network in self.networks.items()}

    def _backward(self, value: Tensor, player: str, last: bool) -> None:
        if not last:
            super()._backward(value, player, last)
            return
        with self.reducers[player].reducing():
            super()._backward(value, player, last)
            self.phases.mark("communication")
        self.phases.mark("forward_backward")

    def _gather(self, player: str) -> None:
        """The gradients are in the vector already."""

    def _end_step(self, metrics: dict[str, Tensor]) -> None:
        super()._end_step(metrics)
        self._agree_on_statistics()

    def finite(self) -> bool:
        return not self.world.any(not super().finite())


class GradientReducer:
    """Adds up one network's gradients over all processes.

    The vector is cut into pieces of whole parameters. The backward pass goes through a network from its end, so pieces are sent from
    the vector's end, and always in that order: processes that do not use the same parameters still send the same pieces.
    """

    def __init__(self, network: FlatNetwork) -> None:
        self.network = network
        self.pieces = list(_cut(network))
        self._piece_of = {index: piece for piece, indices in enumerate(self.pieces) for index in indices}
        self._waiting: list[int] = []
        self._works: list[dist.Work] = []
        self._next = 0
        self._active = False
        for index, parameter in enumerate(network.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._ready(index))  # type: ignore[no-untyped-call]

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """For the backward pass after which the gradients are complete; at its end they are those of all processes."""
        self._waiting, self._next, self._active = [len(indices) for indices in self.pieces], 0, True
        try:
            yield
            while self._next < len(self.pieces):  # pieces of parameters that the loss does not depend on
                self._send()
        finally:
            self._active = False
        for work in self._works:
            work.wait()
        self._works.clear()
        self.network.gathered = True

    def _ready(self, index: int) -> None:
        if not self._active:
            return
        self._waiting[self._piece_of[index]] -= 1
        while self._next < len(self.pieces) and not self._waiting[self._next]:
            self._send()

    def _send(self) -> None:
        indices = self.pieces[self._next]
        slots = self.network.layout.slots
        self.network.gather_piece(indices)
        first, last = slots[min(indices)], slots[max(indices)]
        piece = self.network.gradient[first.offset : last.offset + last.size]
        work = dist.all_reduce(piece, async_op=True)
        assert work is not None
        self._works.append(work)
        self._next += 1


def _cut(network: FlatNetwork) -> Iterator[list[int]]:
    """Numbers of neighbouring parameters, from the last to the first, about as many as make a piece."""
    most, size = _FIRST_BYTES, 0
    piece: list[int] = []
    for index in reversed(range(len(network.layout.slots))):
        piece.append(index)
        size += network.layout.slots[index].size * network.gradient.element_size()
        if size >= most:
            yield piece
            piece, size, most = [], 0, _PIECE_BYTES
    if piece:
        yield piece
