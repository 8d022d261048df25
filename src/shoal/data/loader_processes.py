"""Processes that load batches ahead, with torch's DataLoader. They take turns in a fixed order, so the order of batches is deterministic.

They are never forked from the training process: a fork copies locks that threads of ZeroMQ or gloo hold at that moment, and the child waits
for them for ever. They are forked from a fork server, which has imported torch and has no threads. Their data set is sent to them: tensors
through shared memory, everything else pickled.
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


def loader_here(loader: Loader | None) -> Loader:
    """The settings of loading on this machine. Pinned memory makes copies to a GPU faster, and is not used without one."""
    if loader is None:
        return Loader(pin_memory=False)
    local: Loader = loader.replace(pin_memory=loader.pin_memory and torch.cuda.is_available())
    return local


def pinned(batch: Batch, loader: Loader) -> Batch:
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if loader.pin_memory else batch


def processes_for(dataset: Dataset[Any], loader: Loader, sampler: Iterable[Any] | None = None) -> DataLoader[Any]:
    """The processes that load a data set, which `start_epoch` starts."""
    with _without_worker_warnings():
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=_identity,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            multiprocessing_context=_context(),
            worker_init_fn=_begin,
            # The default would draw a seed from the global generator, and so change the dropout of the next step.
            generator=torch.Generator(),
        )


class FeedPlan(NamedTuple):
    """The batches of a feed."""

    batch_size: int
    seed: int
    shard: tuple[int, int]
    """Index of the shard, and number of shards."""
    part: tuple[int, int]
    """Index of the part of every batch, and number of parts of a batch."""
    drop_last: bool
    reshuffle: bool
    """Whether each epoch has an order of its own."""
    loader: Loader


@contextmanager
def _without_worker_warnings() -> Iterator[None]:
    """Suppress torch's warnings about more processes than cores, and its advice to fork."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        warnings.filterwarnings("ignore", "Got pickle error", UserWarning)
        yield


def _context() -> Any:
    """The start method: fork server, or spawn where the system has none."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _begin(number: int) -> None:
    """Initialise a loader process. It ends when the training process ends, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the training process handles it
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)


def start_epoch(loader: DataLoader[Any]) -> Iterator[LoadedBatch]:
    """The batches that the processes send, of the next epoch if they persist. Raises ShoalError, also later if a process ends early."""
    try:
        with _without_worker_warnings():
            return _received(iter(loader), loader.num_workers)
    except Exception as error:  # objects that cannot be pickled raise many types of errors
        raise ShoalError(
            f"the data cannot be sent to {loader.num_workers} processes that load it ahead: {error}. Set data.loader.num_workers to 0; or, "
            "if the data set is your own, define its classes and functions at the top level of a module"
        ) from error


def _received(loaded: Iterator[LoadedBatch], workers: int) -> Iterator[LoadedBatch]:
    try:
        yield from loaded
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ShoalError(
            f"one of the {workers} processes that load data ahead has ended: {error}. Its output is above; "
            "it may have run out of memory. data.loader.num_workers=0 loads in this process"
        ) from None


class LoadedBatch(NamedTuple):
    """Message of a loader process: a batch, the number of the process, and the position of its reader; or an error."""

    content: Batch | None
    worker: int = 0
    state: State | None = None
    error: str = ""

    def batch(self) -> Batch:
        if self.content is None:
            raise ShoalError(self.error)
        return self.content


def _identity(item: Any) -> Any:
    return item


class IndexedBatches(Dataset[LoadedBatch]):
    """Batches by lists of sample numbers."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, indices: Any) -> LoadedBatch:
        try:
            return LoadedBatch(self._samples.batch(indices))
        except ShoalError as error:  # DataLoader would wrap it in a traceback
            return LoadedBatch(None, error=str(error))


class ShardedBatches(IterableDataset[LoadedBatch]):
    """Batches of a stream. Process w of W reads shard index·W + w of count·W. Each reader resumes from its state in `turns`, beginning with
    the one whose turn it is."""

    def __init__(self, stream: SampleStream, plan: FeedPlan, epoch: int, turns: State) -> None:
        self._stream, self._plan, self._epoch = stream, plan, epoch
        self._turns: State | None = turns

    def __iter__(self) -> Iterator[LoadedBatch]:
        """One epoch, read in a loader process. DataLoader calls this again for each epoch if the processes persist."""
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
            reader = self._stream.read(shard=shard, seed=plan.seed, epoch=epoch if plan.reshuffle else 0, state=state)
            while samples := list(islice(reader, plan.batch_size)):
                if plan.drop_last and len(samples) < plan.batch_size:
                    return
                yield LoadedBatch(self._stream.collate(samples), worker, reader.state_dict())
        except ShoalError as error:
            yield LoadedBatch(None, error=str(error))
