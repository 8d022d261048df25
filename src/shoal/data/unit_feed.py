"""The batches of one unit: a range of an epoch's batches that a worker leases."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shoal.config.schema.data import Loader
from shoal.data.batch_source import part_of, without_samples
from shoal.data.interfaces import Batch, Feed, Samples, State
from shoal.data.loader_processes import loader_here, pinned


class UnitBatches:
    """The batches of an epoch, in units of `batches_per_unit`.

    `loader.num_workers` threads load ahead, since starting processes for each unit would take too long. `part` (index, count) is for
    processes that step together: each gets its part of every batch.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        seed: int,
        reshuffle: bool,
        loader: Loader,
        batches_per_unit: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.samples, self.batch_size, self.batches_per_unit = samples, batch_size, batches_per_unit
        self._seed, self._reshuffle, self._part = seed, reshuffle, part
        self._loader = loader_here(loader)
        self._order: tuple[int, torch.Tensor] | None = None
        self.threads = ThreadPoolExecutor(loader.num_workers, "loader") if loader.num_workers else None

    def at(self, epoch: int, start: int) -> UnitFeed:
        """The batches from `start` to the end of its unit."""
        return UnitFeed(self, epoch, start)

    def batch(self, epoch: int, number: int) -> Batch:
        """One batch, or this process's part of it. The last batch of an epoch may be smaller."""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.samples.order(self._seed, epoch if self._reshuffle else 0)
        whole = self._order[1][number * self.batch_size : (number + 1) * self.batch_size]
        batch = pinned(self.samples.batch(part_of(whole, self._part)), self._loader)
        return without_samples(batch) if len(whole) <= self._part[0] else batch

    def end(self, start: int) -> int:
        """The end of the unit that contains batch `start`."""
        per_epoch = -(-len(self.samples) // self.batch_size)
        return min(per_epoch, (start // self.batches_per_unit + 1) * self.batches_per_unit)


class UnitFeed(Feed):
    """The batches of one unit."""

    def __init__(self, units: UnitBatches, epoch: int, start: int) -> None:
        self._units, self._epoch, self._next, self._end = units, epoch, start, units.end(start)
        self._ahead: deque[Future[Batch]] = deque()
        if units.threads is not None:
            self._ahead.extend(units.threads.submit(units.batch, epoch, number) for number in range(start, self._end))

    def __next__(self) -> Batch:
        if self._next >= self._end:
            raise StopIteration
        number, self._next = self._next, self._next + 1
        return self._ahead.popleft().result() if self._ahead else self._units.batch(self._epoch, number)

    def close(self) -> None:
        for batch in self._ahead:
            batch.cancel()
        self._ahead.clear()

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "position": self._next}

    def load_state_dict(self, state: State) -> None:
        self.close()
        self._epoch, self._next, self._end = state["epoch"], state["position"], self._units.end(state["position"])
