"""Any piece of an epoch, for a worker that is given pieces one by one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from shoal.config.schema.data import Loader
from shoal.data.interfaces import Batch, Samples
from shoal.data.supply import shuffled
from shoal.data.workers import WorkerOptions


class Pieces:
    """Batches of an epoch's order, from any place. `loader.num_workers` threads load ahead; starting processes for each takes long."""

    def __init__(self, samples: Samples, *, batch_size: int, seed: int, reshuffle: bool, loader: Loader) -> None:
        self._samples, self._batch_size, self._seed, self._reshuffle = samples, batch_size, seed, reshuffle
        self._options = WorkerOptions.of(loader, None)
        self._order: tuple[int, torch.Tensor] | None = None
        self._threads = ThreadPoolExecutor(loader.num_workers, "loader") if loader.num_workers else None

    def read(self, epoch: int, start: int, batches: int) -> Iterator[Batch]:
        """`batches` batches, beginning with number `start`. The last one of an epoch may be smaller."""
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, shuffled(self._samples, self._seed, epoch if self._reshuffle else 0)
        order, size = self._order[1], self._batch_size
        wanted = [order[number * size : (number + 1) * size] for number in range(start, start + batches)]
        load = self._threads.map(self._samples.batch, wanted) if self._threads else map(self._samples.batch, wanted)
        return (self._options.pinned(batch) for batch in load)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
