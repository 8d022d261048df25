"""Processes that load batches ahead, with torch's DataLoader. They take turns in a fixed order, so order and state can be predicted.

They are never forked from the process that trains: a fork copies locks that the threads of ZeroMQ or gloo hold at that moment, and the
child waits for them for ever. A server process is started first, which has loaded torch and has no threads, and the loading processes are
forked from it. What they read from is sent to them: tensors go through shared memory, and everything else is copied.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from shoal.config.schema.data import Loader
from shoal.data.interfaces import Batch, Samples, SampleStream, State
from shoal.errors import ShoalError


class LoaderOptions(NamedTuple):
    """How to load ahead."""

    num_workers: int = 0
    prefetch_factor: int = 2
    persistent: bool = False
    pin_memory: bool = False

    @classmethod
    def of(cls, loader: Loader | None) -> LoaderOptions:
        if loader is None:
            return cls()
        # Pinned memory makes copies to a GPU faster; without a GPU it is of no use.
        pin = loader.pin_memory and torch.cuda.is_available()
        return cls(loader.num_workers, loader.prefetch_factor, loader.persistent_workers, pin)

    def pinned(self, batch: Batch) -> Batch:
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self.pin_memory else batch

    def loader(self, dataset: Dataset[Any], sampler: Iterable[Any] | None) -> DataLoader[Any]:
        with _as_many_as_asked():
            return DataLoader(
                dataset,
                batch_size=None,
                sampler=sampler,
                num_workers=self.num_workers,
                collate_fn=_as_it_is,
                pin_memory=self.pin_memory,
                prefetch_factor=self.prefetch_factor,
                persistent_workers=self.persistent,
                multiprocessing_context=_context(),
                worker_init_fn=_begin,
                # Without one of its own it would draw a seed from the global generator, and change what a model with dropout does next.
                generator=torch.Generator(),
            )


class FeedPlan(NamedTuple):
    """Which batches a feed gives."""

    batch_size: int
    seed: int
    shard: tuple[int, int]
    """The number of the shard, and how many there are."""
    part: tuple[int, int]
    """Which part of every batch, and how many parts a batch has."""
    drop_last: bool
    options: LoaderOptions


@contextmanager
def _as_many_as_asked() -> Iterator[None]:
    """The number of processes is the user's choice, and torch warns where there are fewer cores. It also advises to fork."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        warnings.filterwarnings("ignore", "Got pickle error", UserWarning)
        yield


def _context() -> Any:
    """How processes are started: by a server without threads, or afresh where the system has no such server."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _begin(number: int) -> None:
    """Called in a loading process when it begins. It ends with the process that trains, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the one that trains decides what follows
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)


def _start(loader: DataLoader[Any]) -> _Batches:
    try:
        with _as_many_as_asked():
            return _Batches(iter(loader), loader.num_workers)
    except Exception as error:  # what cannot be sent to a process raises one of many kinds of errors
        raise ShoalError(
            f"the data cannot be sent to {loader.num_workers} processes that load it ahead: {error}. Set data.loader.num_workers to 0; or, "
            "where the data is your own, define its classes and functions at the top of a module"
        ) from error


class _Batches:
    """What the processes send, and the reason where one of them ends before its time."""

    def __init__(self, loaded: Iterator[LoadedBatch], workers: int) -> None:
        self._loaded, self._workers = loaded, workers

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> LoadedBatch:
        try:
            return next(self._loaded)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise ShoalError(
                f"one of the {self._workers} processes that load data ahead has ended: {error}. What it said stands above; "
                "memory may be short. data.loader.num_workers=0 loads in this process"
            ) from None


class LoadedBatch(NamedTuple):
    """What a loading process sends: a batch, the process's number, and its reader's position; or the reason why there is no batch."""

    content: Batch | None
    worker: int = 0
    state: State | None = None
    error: str = ""

    def batch(self) -> Batch:
        if self.content is None:
            raise ShoalError(self.error)
        return self.content


def _as_it_is(item: Any) -> Any:
    return item


class IndexedBatches(Dataset[LoadedBatch]):
    """Batches by lists of numbers."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, indices: Any) -> LoadedBatch:
        try:
            return LoadedBatch(self._samples.batch(indices))
        except ShoalError as error:  # DataLoader would wrap it in a traceback
            return LoadedBatch(None, error=str(error))

    def load(self, index_lists: Iterable[list[int]], options: LoaderOptions) -> Iterator[LoadedBatch]:
        return _start(options.loader(self, _Once(index_lists)))


class _Once:
    """Makes an iterator look like a sampler to DataLoader."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class ShardedBatches(IterableDataset[LoadedBatch]):
    """Batches of a stream. Process w of W reads shard index·W + w of count·W."""

    def __init__(self, stream: SampleStream, plan: FeedPlan, reshuffle: bool) -> None:
        self._stream, self._plan, self._reshuffle = stream, plan, reshuffle
        self._epoch = 0
        self._turns: State | None = None
        self._loader: DataLoader[LoadedBatch] | None = None

    def load(self, epoch: int, turns: State) -> Iterator[LoadedBatch]:
        """Go on from the state of each reader, beginning with the one whose turn it is."""
        self._epoch, self._turns = epoch, turns
        loader = self._plan.options.loader(self, None)
        batches = _start(loader)
        self._loader = loader  # only now: a process that is spawned gets a copy of this object
        return batches

    def load_next(self) -> Iterator[LoadedBatch]:
        """The next epoch, from the same processes."""
        assert self._loader is not None
        return _start(self._loader)

    def close(self) -> None:
        self._loader = None

    def __iter__(self) -> Iterator[LoadedBatch]:
        """One epoch, read in a loading process. DataLoader calls this again for each epoch if the processes outlive it."""
        info = get_worker_info()
        assert info is not None
        count = info.num_workers
        turns, self._turns = self._turns or {"turn": 0, "states": [None] * count}, None
        worker = (info.id + turns["turn"]) % count
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._batches(worker, count, epoch, turns["states"][worker])

    def _batches(self, worker: int, count: int, epoch: int, state: State | None) -> Iterator[LoadedBatch]:
        try:
            plan = self._plan
            shard = (plan.shard[0] * count + worker, plan.shard[1] * count)
            reader = self._stream.read(shard=shard, seed=plan.seed, epoch=epoch if self._reshuffle else 0, state=state)
            while samples := list(islice(reader, plan.batch_size)):
                if plan.drop_last and len(samples) < plan.batch_size:
                    return
                yield LoadedBatch(self._stream.collate(samples), worker, reader.state_dict())
        except ShoalError as error:
            yield LoadedBatch(None, error=str(error))
