"""Links of a pipeline stage to its neighbours: hidden states are sent forward, their gradients backward.

Every tensor follows a header with its type and shape, so batches may have any lengths. While a step runs, one thread per neighbour receives
its tensors in order, and the stage takes whatever has arrived.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engines.world import World

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LONGEST = 6
"""Dimensions that a tensor may have."""
_AHEAD = 4
"""Tensors that may be under way to a neighbour that sends nothing back."""


class StageDirection(IntEnum):
    """The direction in which a tensor is sent. Its number is also the tag of its messages."""

    ON = 1
    BACK = 2


class StageLinks:
    """This stage's links. For a pipeline of one stage nothing is ever sent."""

    def __init__(self, world: World, device: torch.device, patience_s: float, ranks: list[int]) -> None:
        """`patience_s`: how long to wait for a silent neighbour; `ranks`: the process of each stage, in the order of the stages. All
        stages must create their links together."""
        self.world, self.device, self._ranks = world, device, ranks
        self.on_gpu = device.type == "cuda"
        patience = timedelta(seconds=patience_s)
        self._letters = dist.new_group(backend="gloo", timeout=patience) if world.size > 1 else None
        # On GPUs one group for each direction: within a group NCCL handles messages in the order in which they were asked for
        groups = (
            {direction: dist.new_group(backend="nccl", timeout=patience) for direction in StageDirection}
            if self.on_gpu and world.size > 1
            else {}
        )
        self._groups = {direction: groups.get(direction, self._letters) for direction in StageDirection}
        self._side = {direction: torch.cuda.Stream(device) if self.on_gpu else None for direction in StageDirection}  # type: ignore[no-untyped-call]
        self._sent: deque[tuple[list[Any], list[Tensor]]] = deque()
        self._arrivals: queue.SimpleQueue[tuple[StageDirection, Tensor] | BaseException] = queue.SimpleQueue()

    # --- sending -----------------------------------------------------------------------------------

    def send(self, direction: StageDirection, tensor: Tensor) -> None:
        """Begin to send a tensor. It must not be written to before `settle`."""
        sent = tensor.detach().contiguous()
        sent = sent if self.on_gpu else sent.cpu()
        header = torch.zeros(2 + _LONGEST, dtype=torch.int64)
        header[0], header[1] = _TYPES.index(sent.dtype), sent.dim()
        header[2 : 2 + sent.dim()] = torch.tensor(sent.shape)
        peer = self._ranks[self.world.stage + (1 if direction is StageDirection.ON else -1)]
        works = [
            dist.isend(header, peer, group=self._letters, tag=direction),
            dist.isend(sent, peer, group=self._groups[direction], tag=2 + direction),
        ]
        self._sent.append((works, [header, sent]))

    def settle(self, left: int = 0) -> None:
        """Wait until at most `left` tensors are still being sent."""
        while len(self._sent) > left:
            works, _ = self._sent.popleft()
            for work in works:
                work.wait()

    def send_ahead(self, tensor: Tensor) -> None:
        """Send hidden states when no gradient will come back, at most `_AHEAD` tensors ahead of the next stage."""
        self.send(StageDirection.ON, tensor)
        self.settle(_AHEAD)

    # --- receiving ---------------------------------------------------------------------------------

    def receive(self, direction: StageDirection) -> Tensor:
        """The next tensor of a neighbour."""
        peer = self._ranks[self.world.stage - (1 if direction is StageDirection.ON else -1)]
        header = torch.zeros(2 + _LONGEST, dtype=torch.int64)
        dist.recv(header, peer, group=self._letters, tag=direction)
        kind, dimensions, *shape = header.tolist()
        side = self._side[direction]
        with nullcontext() if side is None else torch.cuda.stream(side):
            tensor = torch.empty(shape[:dimensions], dtype=_TYPES[kind], device=self.device if self.on_gpu else "cpu")
            dist.recv(tensor, peer, group=self._groups[direction], tag=2 + direction)
            if side is not None:
                side.synchronize()
                tensor.record_stream(torch.cuda.default_stream(self.device))
        return tensor.to(self.device)

    @contextmanager
    def listening(self, counts: dict[StageDirection, int]) -> Iterator[None]:
        """Receive `counts` tensors of each direction in the background; `next` and `waiting` give access to them."""
        threads = [
            threading.Thread(target=self._listen, args=(direction, count), name=f"stage-{direction.name.lower()}", daemon=True)
            for direction, count in counts.items()
            if count
        ]
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join()
        self.settle()

    def _listen(self, direction: StageDirection, count: int) -> None:
        try:
            if self.on_gpu:
                torch.cuda.set_device(self.device)
            for _ in range(count):
                self._arrivals.put((direction, self.receive(direction)))
        except Exception as error:
            self._arrivals.put(error)

    @property
    def waiting(self) -> bool:
        """Whether something has arrived that was not taken yet."""
        return not self._arrivals.empty()

    def next(self) -> tuple[StageDirection, Tensor]:
        """Wait for the next tensor that arrives and return it. Raises the error of a failed neighbour."""
        found = self._arrivals.get()
        if isinstance(found, BaseException):
            raise found
        return found
