"""Island: the processes of a multi-process engine as one worker. The first process leads, the others follow its commands.

A command is an enum value and three numbers, followed by the weights where the command needs them. Only the first process communicates with
the coordinator.
"""

from __future__ import annotations

import time
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

_STRIDE_S = 1.0


class IslandCheckpoint(Protocol):
    """Checkpoint of the state of all processes together."""

    def due(self, version: int) -> bool: ...
    def save(self, version: int, residual: Tensor | None) -> None: ...
    def restore(self, version: int, residual: Tensor | None) -> None: ...
    def steps_until_save(self, step: int) -> int: ...
    def save_partial_round(self, half: Any, residual: Tensor | None) -> None: ...
    def find_partial_round(self, begins: Any) -> Any: ...
    @property
    def partial_round_step(self) -> int: ...
    def has_partial_round(self, step: int) -> bool: ...
    def resume_partial_round(self, residual: Tensor | None, within: bool) -> None: ...
    def delete_partial_round(self) -> None: ...
    def tell(self, text: str) -> None: ...


class IslandCommand(IntEnum):
    """A command of the first process to all processes."""

    LEAVE = auto()
    SIT = auto()
    STEP = auto()
    WALK = auto()
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
    SAVE_HALF = auto()
    FIND_HALF = auto()
    RESUME_HALF = auto()
    FORGET_HALF = auto()


class IslandProcess:
    """Operations that every process of an island carries out."""

    def __init__(self, engine: Engine, feed_for: Callable[[int, int, int], Feed], keepsakes: IslandCheckpoint) -> None:
        self.engine, self.crew = engine, engine.crew
        self.feed_for, self.keepsakes = feed_for, keepsakes

    def counted(self, result: StepResult) -> StepResult:
        """The metrics of all processes together."""
        return StepResult(self.crew.total(result.metrics), result.weight, result.samples)

    def walked(self, feed: Iterator[Batch], accumulation: int, count: int) -> StepResult:
        """Let each process take steps by itself. Returns the metrics of all processes together."""
        sums, weight, samples = dict[str, Tensor](), 0, 0
        for _ in range(count):
            result = self.engine.step([next(feed) for _ in range(accumulation)])
            for name, value in result.metrics.items():
                sums[name] = sums.get(name, 0.0) + value * result.weight
            weight, samples = weight + result.weight, samples + result.samples
        whole, of_samples = map(int, self.crew.begin_sum([weight, samples]).wait())
        return StepResult({name: value / whole for name, value in self.crew.total(sums).items()}, whole, of_samples)

    def load(self, vector: Tensor | None) -> None:
        """Load all networks' weights, which the first process passes and the others receive."""
        self.engine.load_wholes(self._shared(vector))

    def _shared(self, vector: Tensor | None) -> Iterator[Tensor]:
        """Broadcast the weights parameter by parameter, so that only the first process needs memory for all of them."""
        at = 0
        for layout in self.engine.layouts.values():
            for slot in layout.slots:
                there = torch.empty(slot.size) if vector is None else vector[at : at + slot.size]
                yield self.crew.broadcast(there).view(slot.shape)
                at += slot.size

    def load_buffers(self, values: Tensor) -> None:
        self.engine.load_buffers(self.crew.broadcast(values))


class IslandFollower(IslandProcess):
    """Any process of the island except the first."""

    feed: Feed | None = None

    def work(self) -> None:
        """Carry out the first process's commands until it sends the command to leave."""
        while (order := self._hear())[0] != IslandCommand.LEAVE:
            self._obey(*order)
        if self.feed is not None:
            self.feed.close()

    def _hear(self) -> tuple[int, float, float, float]:
        order, first, second, third = self.crew.broadcast_numbers([0.0] * 4)
        return int(order), first, second, third

    def _obey(self, order: int, first: float, second: float, third: float) -> None:
        engine = self.engine
        match IslandCommand(order):
            case IslandCommand.SIT:
                if self.feed is not None:
                    self.feed.close()
                self.feed = self.feed_for(int(first), int(second), int(third))
            case IslandCommand.STEP:
                engine.step_count = int(second)
                self.counted(engine.step(self._batches(int(first))))
            case IslandCommand.WALK:
                assert self.feed is not None
                engine.step_count = int(third)
                self.walked(self.feed, int(first), int(second))
            case IslandCommand.GRADIENTS:
                self.counted(engine.gradients(self._batches(int(first))))
            case IslandCommand.UNSCALE:
                engine.unscale()
            case IslandCommand.APPLY:
                engine.apply_own(first)
            case IslandCommand.FORGET:
                engine.forget_past()
            case IslandCommand.GATHER:
                _go_through(engine.wholes())
            case IslandCommand.GATHER_GRADIENT:
                _go_through(engine.slopes())
            case IslandCommand.LOAD:
                self.load(None)
            case IslandCommand.LOAD_BUFFERS:
                self.load_buffers(torch.empty(int(first)))
            case IslandCommand.SAVE:
                self.keepsakes.save(int(first), None)
            case IslandCommand.RESTORE:
                self.keepsakes.restore(int(first), None)
            case _:
                self._obey_about_half(order, int(first))

    def _obey_about_half(self, order: int, number: int) -> None:
        match IslandCommand(order):
            case IslandCommand.SAVE_HALF:
                self.keepsakes.save_partial_round(None, None)
            case IslandCommand.FIND_HALF:
                self.crew.any(not self.keepsakes.has_partial_round(number))
            case IslandCommand.RESUME_HALF:
                self.keepsakes.resume_partial_round(None, bool(number))
            case IslandCommand.FORGET_HALF:
                self.keepsakes.delete_partial_round()

    def _batches(self, count: int) -> list[Batch]:
        assert self.feed is not None
        return [next(self.feed) for _ in range(count)]


class Island(IslandProcess):
    """The first process. The worker's loop uses it like an engine of one process, with all weights in one vector."""

    def __init__(self, engine: Engine, feed_for: Callable[[int, int, int], Feed], keepsakes: IslandCheckpoint, readers: int) -> None:
        """`readers`: the number of processes that read batches of their own."""
        super().__init__(engine, feed_for, keepsakes)
        self.readers = readers
        self.world = World()
        """The worker's loop sees one process."""
        self.device, self.layouts = engine.device, engine.layouts
        self._vector, self._gradient = torch.empty(engine.size), torch.empty(engine.size)
        self._moved = True
        """Whether the weights have moved since they were gathered."""
        self._stride = 1
        """Steps that the processes take before they synchronise."""

    def _say(self, order: IslandCommand, *numbers: float) -> None:
        self.crew.broadcast_numbers([float(order), *numbers, *[0.0] * (3 - len(numbers))])

    def leave(self) -> None:
        """Send all processes the command to leave."""
        self._say(IslandCommand.LEAVE)

    # --- the data ----------------------------------------------------------------------------------

    def sit(self, seat: int, epoch: int, position: int) -> IslandFeed:
        """Open a seat's data in all processes, each with its part."""
        self._say(IslandCommand.SIT, seat, epoch, position)
        return IslandFeed(self.feed_for(seat, epoch, position), self.readers)

    # --- computing ---------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        return self.engine.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.engine.step_count = count

    def step(self, batches: list[Batch]) -> StepResult:
        self._say(IslandCommand.STEP, len(batches), self.step_count)
        self._moved = True
        return self.counted(self.engine.step(batches))

    def take_steps(self, feed: Iterator[Batch], accumulation: int, most: int) -> tuple[StepResult, int]:
        """One step in engines that step together; otherwise as many steps as take about one second, after which the processes
        synchronise."""
        if self.crew is self.engine.world:
            return self.step([next(feed) for _ in range(accumulation)]), 1
        count, started = min(most, self._stride), time.monotonic()
        self._say(IslandCommand.WALK, accumulation, count, self.step_count)
        self._moved = True
        result = self.walked(feed, accumulation, count)
        self._stride = max(1, round(_STRIDE_S * count / (time.monotonic() - started)))
        return result, count

    def gradients(self, batches: list[Batch]) -> StepResult:
        self._say(IslandCommand.GRADIENTS, len(batches))
        return self.counted(self.engine.gradients(batches))

    def expect(self, moved: Tensor) -> None:
        """Ignored: an island computes all networks' gradients at its current weights."""

    def gradients_by_sample(self, batches: list[Batch], limit: float) -> StepResult:
        raise ShoalError("updates.privacy.unit: samples are clipped one by one in a single process: set engine.kind=single")

    def unscale(self) -> None:
        self._say(IslandCommand.UNSCALE)
        self.engine.unscale()

    def apply_own(self, step: float) -> dict[str, Tensor]:
        self._say(IslandCommand.APPLY, step)
        self._moved = True
        return self.engine.apply_own(step)

    def forget_past(self) -> None:
        self._say(IslandCommand.FORGET)
        self.engine.forget_past()

    def learning_rates(self) -> dict[str, float]:
        return self.engine.learning_rates()

    # --- the flat view -----------------------------------------------------------------------------

    @property
    def vector(self) -> Tensor:
        """All weights, in main memory. A caller that writes into it must call `changed`."""
        if self._moved:
            self._say(IslandCommand.GATHER)
            _fill(self._vector, self.engine.wholes())
            self._moved = False
        return self._vector

    def changed(self) -> None:
        self._say(IslandCommand.LOAD)
        self.load(self._vector)

    @property
    def gradient(self) -> Tensor:
        self._say(IslandCommand.GATHER_GRADIENT)
        return _fill(self._gradient, self.engine.slopes())

    @property
    def buffers(self) -> Tensor:
        return self.engine.buffers

    def take_report(self) -> Tensor:
        return self.engine.take_report()

    def load_buffers(self, values: Tensor) -> None:
        self._say(IslandCommand.LOAD_BUFFERS, values.numel())
        super().load_buffers(values)

    # --- what is kept ------------------------------------------------------------------------------

    def save(self, version: int, residual: Tensor | None) -> None:
        if self.keepsakes.due(version):
            self._say(IslandCommand.SAVE, version)
            self.keepsakes.save(version, residual)

    def restore(self, version: int, residual: Tensor | None) -> None:
        self._say(IslandCommand.RESTORE, version)
        self._moved = True
        self.keepsakes.restore(version, residual)

    def steps_until_save(self, step: int) -> int:
        return self.keepsakes.steps_until_save(step)

    def save_partial_round(self, half: Any, residual: Tensor | None) -> None:
        self._say(IslandCommand.SAVE_HALF)
        self.keepsakes.save_partial_round(half, residual)

    def find_partial_round(self, begins: Any) -> Any:
        """The saved part of a round, if every process has its part of it."""
        half = self.keepsakes.find_partial_round(begins)
        if half is None:
            return None
        self._say(IslandCommand.FIND_HALF, self.keepsakes.partial_round_step)
        if not self.crew.any(False):
            return half
        self.keepsakes.tell("half a round was kept, but not by all processes of this worker: it is deleted, and the round is begun again")
        self.delete_partial_round()
        return None

    def resume_partial_round(self, residual: Tensor | None, within: bool) -> None:
        self._say(IslandCommand.RESUME_HALF, within)
        self._moved = True
        self.keepsakes.resume_partial_round(residual, within)

    def delete_partial_round(self) -> None:
        self._say(IslandCommand.FORGET_HALF)
        self.keepsakes.delete_partial_round()


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


def _go_through(wholes: Iterable[Tensor]) -> None:
    for _ in wholes:
        pass
