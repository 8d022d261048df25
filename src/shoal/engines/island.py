"""Island: the processes of a multi-process engine as one worker. The first process leads, the others follow its commands.

A command is an enum value and three numbers, followed by the weights where the command needs them. Only the first process communicates with
the coordinator.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum, auto
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.data import Feed
from shoal.engines.base import Engine
from shoal.engines.world import World
from shoal.errors import ShoalError
from shoal.tasks import Batch, StepResult
from shoal.updates.worker_state import PartialRound, RoundStart, WorkerCheckpoint

_STRIDE_S = 1.0


class IslandCheckpoint(WorkerCheckpoint, Protocol):
    """Checkpoint of the state of all processes together: what a worker of one process needs, and what the processes must agree about."""

    def due(self, version: int) -> bool: ...
    def save_partial_round(self, partial: PartialRound | None, residual: Tensor | None) -> None:
        """`partial` is None in all processes but the first."""

    @property
    def partial_round_step(self) -> int: ...
    def has_partial_round(self, step: int) -> bool: ...
    def tell(self, text: str, /) -> None: ...


class IslandCommand(IntEnum):
    """A command of the first process to all processes."""

    LEAVE = auto()
    OPEN_FEED = auto()
    STEP = auto()
    TAKE_STEPS = auto()
    GRADIENTS = auto()
    UNSCALE = auto()
    APPLY = auto()
    FORGET = auto()
    GATHER = auto()
    GATHER_GRADIENT = auto()
    LOAD = auto()
    LOAD_BUFFERS = auto()
    SAVE = auto()
    RESTORE = auto()
    SAVE_PARTIAL_ROUND = auto()
    FIND_PARTIAL_ROUND = auto()
    RESUME_PARTIAL_ROUND = auto()
    DELETE_PARTIAL_ROUND = auto()


class IslandProcess:
    """Operations that every process of an island carries out."""

    def __init__(self, engine: Engine, feed_for: Callable[[int, int, int], Feed], checkpoints: IslandCheckpoint) -> None:
        self.engine, self.worker_world = engine, engine.worker_world
        self.feed_for, self.checkpoints = feed_for, checkpoints

    def counted(self, result: StepResult) -> StepResult:
        """The metrics of all processes together."""
        return StepResult(self.worker_world.total(result.metrics), result.weight, result.samples)

    def take_own_steps(self, feed: Iterator[Batch], accumulation: int, count: int) -> StepResult:
        """Let each process take steps by itself. Returns the metrics of all processes together."""
        sums, weight, samples = dict[str, Tensor](), 0, 0
        for _ in range(count):
            with self.engine.phases.on_host("data"):
                batches = [next(feed) for _ in range(accumulation)]
            result = self.engine.step(batches)
            for name, value in result.metrics.items():
                sums[name] = sums.get(name, 0.0) + value * result.weight
            weight, samples = weight + result.weight, samples + result.samples
        whole, of_samples = map(int, self.worker_world.begin_sum([weight, samples]).wait())
        return StepResult({name: value / whole for name, value in self.worker_world.total(sums).items()}, whole, of_samples)

    def load(self, vector: Tensor | None) -> None:
        """Load all networks' weights, which the first process passes and the others receive."""
        self.engine.load_wholes(self._shared(vector))

    def _shared(self, vector: Tensor | None) -> Iterator[Tensor]:
        """Broadcast the weights parameter by parameter, so that only the first process needs memory for all of them."""
        at = 0
        for layout in self.engine.layouts.values():
            for slot in layout.slots:
                values = torch.empty(slot.size) if vector is None else vector[at : at + slot.size]
                yield self.worker_world.broadcast(values).view(slot.shape)
                at += slot.size

    def load_buffers(self, values: Tensor) -> None:
        self.engine.load_buffers(self.worker_world.broadcast(values))


class IslandFollower(IslandProcess):
    """Any process of the island except the first."""

    feed: Feed | None = None

    def work(self) -> None:
        """Carry out the first process's commands until it sends the command to leave."""
        while (command := self.worker_world.broadcast_numbers([0.0] * 4))[0] != IslandCommand.LEAVE:
            self._execute(*command)
        if self.feed is not None:
            self.feed.close()

    def _execute(self, command: float, first: float, second: float, third: float) -> None:
        engine, checkpoints, number = self.engine, self.checkpoints, int(first)
        actions: dict[IslandCommand, Callable[[], object]] = {
            IslandCommand.OPEN_FEED: lambda: self._open_feed(number, int(second), int(third)),
            IslandCommand.STEP: lambda: self.counted(engine.step(self._batches(number))),
            IslandCommand.TAKE_STEPS: lambda: self.take_own_steps(self._open, number, int(second)),
            IslandCommand.GRADIENTS: lambda: self.counted(engine.gradients(self._batches(number))),
            IslandCommand.UNSCALE: engine.unscale,
            IslandCommand.APPLY: lambda: engine.apply_own(first),
            IslandCommand.FORGET: engine.forget_past,
            IslandCommand.GATHER: lambda: deque(engine.wholes(), maxlen=0),
            IslandCommand.GATHER_GRADIENT: lambda: deque(engine.slopes(), maxlen=0),
            IslandCommand.LOAD: lambda: self.load(None),
            IslandCommand.LOAD_BUFFERS: lambda: self.load_buffers(torch.empty(number)),
            IslandCommand.SAVE: lambda: checkpoints.save(number, None),
            IslandCommand.RESTORE: lambda: checkpoints.restore(number, None),
            IslandCommand.SAVE_PARTIAL_ROUND: lambda: checkpoints.save_partial_round(None, None),
            IslandCommand.FIND_PARTIAL_ROUND: lambda: self.worker_world.any(not checkpoints.has_partial_round(number)),
            IslandCommand.RESUME_PARTIAL_ROUND: lambda: checkpoints.resume_partial_round(None, bool(number)),
            IslandCommand.DELETE_PARTIAL_ROUND: checkpoints.delete_partial_round,
        }
        if command in (IslandCommand.STEP, IslandCommand.TAKE_STEPS):
            engine.step_count = int(third)
        actions[IslandCommand(int(command))]()

    def _open_feed(self, seat: int, epoch: int, position: int) -> None:
        if self.feed is not None:
            self.feed.close()
        self.feed = self.feed_for(seat, epoch, position)

    @property
    def _open(self) -> Feed:
        assert self.feed is not None
        return self.feed

    def _batches(self, count: int) -> list[Batch]:
        return [next(self._open) for _ in range(count)]


class Island(IslandProcess):
    """The first process. The worker's loop uses it like an engine of one process, with all weights in one vector."""

    def __init__(self, engine: Engine, feed_for: Callable[[int, int, int], Feed], checkpoints: IslandCheckpoint, readers: int) -> None:
        """`readers`: the number of processes that read batches of their own."""
        super().__init__(engine, feed_for, checkpoints)
        self.readers = readers
        self.world = World()
        """The worker's loop sees one process."""
        self.device, self.layouts, self.phases = engine.device, engine.layouts, engine.phases
        self._vector, self._gradient = torch.empty(engine.size), torch.empty(engine.size)
        self._moved = True
        """Whether the weights have moved since they were gathered."""
        self._stride = 1
        """Steps that the processes take before they synchronise."""

    def _send(self, order: IslandCommand, *numbers: float) -> None:
        self.worker_world.broadcast_numbers([float(order), *numbers, *[0.0] * (3 - len(numbers))])

    def leave(self) -> None:
        self._send(IslandCommand.LEAVE)

    @property
    def keeps_partial_rounds(self) -> bool:
        return self.checkpoints.keeps_partial_rounds

    # --- the data ----------------------------------------------------------------------------------

    def open_feed(self, seat: int, epoch: int, position: int) -> IslandFeed:
        """Open a seat's data in all processes, each with its part."""
        self._send(IslandCommand.OPEN_FEED, seat, epoch, position)
        return IslandFeed(self.feed_for(seat, epoch, position), self.readers)

    # --- computing ---------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        return self.engine.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.engine.step_count = count

    def step(self, batches: list[Batch]) -> StepResult:
        self._send(IslandCommand.STEP, len(batches), 0, self.step_count)
        self._moved = True
        return self.counted(self.engine.step(batches))

    def take_steps(self, feed: Iterator[Batch], accumulation: int, most: int) -> tuple[StepResult, int]:
        """One step in engines that step together; otherwise steps for about one second, after which the processes synchronise."""
        if self.worker_world is self.engine.world:
            with self.engine.phases.on_host("data"):
                batches = [next(feed) for _ in range(accumulation)]
            return self.step(batches), 1
        count, started = min(most, self._stride), time.monotonic()
        self._send(IslandCommand.TAKE_STEPS, accumulation, count, self.step_count)
        self._moved = True
        result = self.take_own_steps(feed, accumulation, count)
        self._stride = max(1, round(_STRIDE_S * count / (time.monotonic() - started)))
        return result, count

    def gradients(self, batches: list[Batch]) -> StepResult:
        self._send(IslandCommand.GRADIENTS, len(batches))
        return self.counted(self.engine.gradients(batches))

    def expect(self, moved: Tensor) -> None:
        """Ignored: an island computes all networks' gradients at its current weights."""

    def gradients_by_sample(self, batches: list[Batch], limit: float) -> StepResult:
        raise ShoalError("updates.privacy.unit: samples are clipped one by one in a single process: set engine.kind=single")

    def unscale(self) -> None:
        self._send(IslandCommand.UNSCALE)
        self.engine.unscale()

    def apply_own(self, step: float) -> dict[str, Tensor]:
        self._send(IslandCommand.APPLY, step)
        self._moved = True
        return self.engine.apply_own(step)

    def forget_past(self) -> None:
        self._send(IslandCommand.FORGET)
        self.engine.forget_past()

    def learning_rates(self) -> dict[str, float]:
        return self.engine.learning_rates()

    # --- the flat view -----------------------------------------------------------------------------

    @property
    def vector(self) -> Tensor:
        """All weights, in main memory. A caller that writes into it must call `changed`."""
        if self._moved:
            self._send(IslandCommand.GATHER)
            _fill(self._vector, self.engine.wholes())
            self._moved = False
        return self._vector

    def changed(self) -> None:
        self._send(IslandCommand.LOAD)
        self.load(self._vector)

    @property
    def gradient(self) -> Tensor:
        self._send(IslandCommand.GATHER_GRADIENT)
        return _fill(self._gradient, self.engine.slopes())

    @property
    def buffers(self) -> Tensor:
        return self.engine.buffers

    def take_report(self) -> Tensor:
        return self.engine.take_report()

    def load_buffers(self, values: Tensor) -> None:
        self._send(IslandCommand.LOAD_BUFFERS, values.numel())
        super().load_buffers(values)

    # --- what is kept ------------------------------------------------------------------------------

    def save(self, version: int, residual: Tensor | None) -> None:
        if self.checkpoints.due(version):
            self._send(IslandCommand.SAVE, version)
            self.checkpoints.save(version, residual)

    def restore(self, version: int, residual: Tensor | None) -> None:
        self._send(IslandCommand.RESTORE, version)
        self._moved = True
        self.checkpoints.restore(version, residual)

    def steps_until_save(self, step: int) -> int:
        return self.checkpoints.steps_until_save(step)

    def save_partial_round(self, partial: PartialRound, residual: Tensor | None) -> None:
        self._send(IslandCommand.SAVE_PARTIAL_ROUND)
        self.checkpoints.save_partial_round(partial, residual)

    def find_partial_round(self, begins: RoundStart) -> PartialRound | None:
        """The saved part of a round, if every process has its part of it."""
        partial = self.checkpoints.find_partial_round(begins)
        if partial is None:
            return None
        self._send(IslandCommand.FIND_PARTIAL_ROUND, self.checkpoints.partial_round_step)
        if not self.worker_world.any(False):
            return partial
        self.checkpoints.tell(
            "a partial round was saved, but not by all processes of this worker: it is deleted, and the round starts again"
        )
        self.delete_partial_round()
        return None

    def resume_partial_round(self, residual: Tensor | None, within: bool) -> None:
        self._send(IslandCommand.RESUME_PARTIAL_ROUND, within)
        self._moved = True
        self.checkpoints.resume_partial_round(residual, within)

    def delete_partial_round(self) -> None:
        self._send(IslandCommand.DELETE_PARTIAL_ROUND)
        self.checkpoints.delete_partial_round()


class IslandFeed(Feed):
    """The first process's part of the data. It counts batches as a worker of one process does: one for each process that reads."""

    def __init__(self, feed: Feed, ranks: int) -> None:
        self._feed, self._ranks = feed, ranks

    def __next__(self) -> Batch:
        return next(self._feed)

    def close(self) -> None:
        self._feed.close()

    def state_dict(self) -> dict[str, Any]:
        state = self._feed.state_dict()
        return state | {"position": state["position"] * self._ranks}


def _fill(vector: Tensor, wholes: Iterable[Tensor]) -> Tensor:
    at = 0
    for whole in wholes:
        vector[at : at + whole.numel()].copy_(whole.detach().flatten())
        at += whole.numel()
    return vector
