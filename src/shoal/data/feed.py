"""The endless training feed of one shard, epoch after epoch. It can be saved and resumed at any batch."""

from __future__ import annotations

from shoal.config.schema.data import Loader
from shoal.data.batch_source import SampleBatches, StreamBatches
from shoal.data.interfaces import Batch, Feed, Samples, SampleStream, State
from shoal.data.loader_processes import FeedPlan, loader_here
from shoal.errors import ShoalError


class ShardFeed(Feed):
    """Batches of one shard. Each epoch has a new order, which the seed determines for all shards; shard i of n takes every n-th sample.

    `part` (index, count) is for processes that step together: each gets its part of every batch, which is empty where a last batch is too
    small. The position counts whole batches, so any number of processes can resume from it.
    `loader.num_workers` processes load ahead; with 0 or no loader this process loads.
    """

    def __init__(
        self,
        samples: Samples | SampleStream,
        *,
        batch_size: int,
        seed: int,
        shard: tuple[int, int] = (0, 1),
        part: tuple[int, int] = (0, 1),
        drop_last: bool = True,
        reshuffle: bool = True,
        loader: Loader | None = None,
    ) -> None:
        index, count = shard
        if not 0 <= index < count:
            raise ValueError(f"shard {index} of {count}")
        self._batch_size, self._shard = batch_size, shard
        plan = FeedPlan(batch_size, seed, shard, part, drop_last, reshuffle, loader_here(loader))
        self._source = StreamBatches(samples, plan) if isinstance(samples, SampleStream) else SampleBatches(samples, plan)
        self.batches_per_epoch = self._source.batches_per_epoch
        self.epoch = 0
        self.position = 0
        """Batches consumed in the epoch."""
        self._reader: State | None = None
        self._ahead: tuple[Batch, State | None] | None = None
        self._open = False

    def __next__(self) -> Batch:
        loaded = self._look_ahead()
        if loaded is None:
            self.epoch, self.position, self._reader, self._open = self.epoch + 1, 0, None, False
            loaded = self._look_ahead()
        if loaded is None:
            index, count = self._shard
            raise ShoalError(
                f"there is not one batch of {self._batch_size} samples in shard {index + 1} of {count}: "
                "take more data, a smaller batch, or fewer workers"
            )
        self._ahead = None
        self.position += 1
        batch, self._reader = loaded
        return batch

    @property
    def at_epoch_end(self) -> bool:
        """Whether the next batch belongs to another epoch. A stream is read one batch ahead to find out."""
        if self.batches_per_epoch is not None:
            return self.position == self.batches_per_epoch
        return self.position > 0 and self._look_ahead() is None

    def _look_ahead(self) -> tuple[Batch, State | None] | None:
        if not self._open:
            self._source.open(self.epoch, self.position, self._reader)
            self._open = True
        if self._ahead is None:
            self._ahead = self._source.pull()
        return self._ahead

    def state_dict(self) -> State:
        """The position in the data, as a small value that JSON can hold. Batches that were only loaded ahead do not count."""
        state: State = {"epoch": self.epoch, "position": self.position, "batch_size": self._batch_size, "shard": list(self._shard)}
        if self.batches_per_epoch is None:
            state |= {"workers": self._source.workers, "reader": self._reader}
        return state

    def load_state_dict(self, state: State) -> None:
        """Resume at the position of a feed with the same data and seed. Holds: the next batches are those that it would have returned."""
        self.close()
        self._reader = None
        self.epoch, self.position = state["epoch"], state["position"]
        if self.batches_per_epoch is None:
            self._check_stream(state)
            self._reader = state["reader"]
        elif (state["batch_size"], state["shard"][1]) != (self._batch_size, self._shard[1]):
            self._convert(state)

    def _check_stream(self, state: State) -> None:
        current = {"shard": list(self._shard), "workers": self._source.workers}
        for name, setting in (("shard", "shard (index, count)"), ("workers", "data.loader.num_workers")):
            if state[name] != current[name]:
                raise ShoalError(f"a stream resumes only with the same settings: {setting} was {state[name]}, and is now {current[name]}")

    def _convert(self, state: State) -> None:
        """Convert a position of another batch size or number of shards. All shards together have consumed the beginning of the order."""
        consumed = state["position"] * state["batch_size"] * state["shard"][1]
        step = self._batch_size * self._shard[1]
        if consumed >= (self.batches_per_epoch or 0) * step:
            self.epoch, self.position = state["epoch"] + 1, 0
        elif consumed % step:
            raise ShoalError(
                f"{consumed:,} samples of the epoch are used up, which is no whole number of steps of {self._batch_size} samples × "
                f"{self._shard[1]} shards: go on with {state['batch_size']} × {state['shard'][1]}, or from another checkpoint"
            )
        else:
            self.position = consumed // step

    def close(self) -> None:
        """End the processes that load ahead. The next batch starts them again."""
        self._source.close()
        self._ahead, self._open = None, False
