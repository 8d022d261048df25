"""The source of a feed's batches: numbered samples or a stream, loaded in this process or by loader processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from shoal.data.interfaces import Batch, Samples, SampleStream, State, StreamReader
from shoal.data.loader_processes import FeedPlan, IndexedBatches, LoadedBatch, ShardedBatches, pinned, processes_for, start_epoch
from shoal.errors import ShoalError

_Several = TypeVar("_Several", torch.Tensor, list[Any])


def part_of(whole: _Several, part: tuple[int, int]) -> _Several:
    """The samples index, index + count, … of a batch. An empty part gets the first one, which `without_samples` removes later."""
    index, count = part
    return whole[index::count] if len(whole) > index else whole[:1]


def without_samples(batch: Batch) -> Batch:
    return {name: value[:0] for name, value in batch.items()}


class SampleBatches:
    """Batches of one shard of numbered samples."""

    def __init__(self, samples: Samples, plan: FeedPlan) -> None:
        self._samples, self._plan, self._loader = samples, plan, plan.loader
        index, count = plan.shard
        self._size = size = len(range(index, len(samples), count))
        self.batches_per_epoch = size // plan.batch_size if plan.drop_last else -(-size // plan.batch_size)
        self.workers = plan.loader.num_workers
        if not self.batches_per_epoch:
            raise ShoalError(
                f"{len(samples):,} samples over {count} shard{'s' * (count > 1)} do not make one batch of {plan.batch_size}: "
                "take more data, a smaller batch, or fewer workers"
            )
        self._epoch, self._next = 0, 0
        self._order: tuple[int, torch.Tensor] | None = None
        self._loaded: Iterator[LoadedBatch] | None = None

    def open(self, epoch: int, position: int, state: State | None) -> None:
        """Prepare to load the batch at a position of an epoch."""
        continues = self._loader.persistent_workers and (epoch, position) == (self._epoch + 1, 0) and self._next == self.batches_per_epoch
        if not continues:
            self._loaded = None
        self._epoch, self._next = epoch, position

    def pull(self) -> tuple[Batch, None] | None:
        if self._next >= self.batches_per_epoch:
            return None
        batch = self._load()
        size = self._plan.batch_size
        is_empty = min(size, self._size - self._next * size) <= self._plan.part[0]
        self._next += 1
        return without_samples(batch) if is_empty else batch, None

    def _load(self) -> Batch:
        if not self.workers:
            return pinned(self._samples.batch(self._indices(self._epoch, self._next)), self._loader)
        if self._loaded is None:
            index_lists = self._index_lists(self._epoch, self._next)
            self._loaded = start_epoch(processes_for(IndexedBatches(self._samples), self._loader, index_lists))
        return next(self._loaded).batch()

    def _index_lists(self, epoch: int, position: int) -> Iterator[list[int]]:
        """The sample numbers of each batch: to the end of the epoch, or without end where the processes persist."""
        while True:
            for number in range(position, self.batches_per_epoch):
                yield self._indices(epoch, number).tolist()
            if not self._loader.persistent_workers:
                return
            epoch, position = epoch + 1, 0

    def _indices(self, epoch: int, number: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            index, count = self._plan.shard
            order = self._samples.order(self._plan.seed, epoch if self._plan.reshuffle else 0)
            self._order = epoch, order[index::count].contiguous()
        whole = self._order[1][number * self._plan.batch_size : (number + 1) * self._plan.batch_size]
        return part_of(whole, self._plan.part)

    def close(self) -> None:
        self._loaded = self._order = None


class StreamBatches:
    """Batches of one shard of a stream. With processes that load ahead, each reads a part of the shard, and they take turns."""

    batches_per_epoch = None

    def __init__(self, stream: SampleStream, plan: FeedPlan) -> None:
        self._stream, self._plan = stream, plan
        self.workers = plan.loader.num_workers
        self._reader: StreamReader | None = None
        self._processes: DataLoader[LoadedBatch] | None = None
        self._loaded: Iterator[LoadedBatch] | None = None

    def open(self, epoch: int, position: int, state: State | None) -> None:
        plan = self._plan
        if not self.workers:
            self._reader = self._stream.read(shard=plan.shard, seed=plan.seed, epoch=epoch if plan.reshuffle else 0, state=state)
            return
        self._turns: State = state or {"turn": 0, "states": [None] * self.workers}
        if self._processes is None or not plan.loader.persistent_workers or position or state is not None:
            self._processes = processes_for(ShardedBatches(self._stream, plan, epoch, self._turns), plan.loader)
        self._loaded = start_epoch(self._processes)

    def pull(self) -> tuple[Batch, State] | None:
        if self.workers:
            return self._from_workers()
        assert self._reader is not None
        plan = self._plan
        samples = list(islice(self._reader, plan.batch_size))
        if not samples or (plan.drop_last and len(samples) < plan.batch_size):
            return None
        batch = self._stream.collate(part_of(samples, plan.part))
        return pinned(without_samples(batch) if len(samples) <= plan.part[0] else batch, plan.loader), self._reader.state_dict()

    def _from_workers(self) -> tuple[Batch, State] | None:
        assert self._loaded is not None
        loaded = next(self._loaded, None)
        if loaded is None:
            self._loaded = iter(())
            return None
        states = list(self._turns["states"])
        states[loaded.worker] = loaded.state
        self._turns = {"turn": (loaded.worker + 1) % self.workers, "states": states}
        index, count = self._plan.part
        return {name: value[index::count] for name, value in loaded.batch().items()}, self._turns

    def close(self) -> None:
        self._reader = self._processes = self._loaded = None
