"""Mixtures of streams by weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.interfaces import Batch, SampleStream, State, StreamReader

_DRAWS = 1024


class MixedStream(SampleStream):
    """A mixture of streams. An epoch ends when each was read completely; streams that end sooner are read again."""

    def __init__(self, streams: Sequence[SampleStream], shares: NDArray[np.float64]) -> None:
        self.streams = list(streams)
        self.shares = shares

    def read(self, *, shard: tuple[int, int], seed: int, epoch: int, state: State | None = None) -> StreamReader:
        return MixedReader(self, shard, seed, epoch, state)

    def collate(self, samples: Sequence[Any]) -> Batch:
        return self.streams[0].collate(samples)


class MixedReader(StreamReader):
    """Draws samples of one shard. Holds: the n-th draw depends only on the seed, the epoch and n."""

    def __init__(self, mixture: MixedStream, shard: tuple[int, int], seed: int, epoch: int, state: State | None) -> None:
        self._mixture = mixture
        self._shard, self._seed, self._epoch = shard, seed, epoch
        count = len(mixture.streams)
        state = state or {"draw": 0, "passes": [0] * count, "given": [0] * count, "empty": [False] * count, "parts": [None] * count}
        self._draw: int = state["draw"]
        self._block: int | None = None
        self._passes: list[int] = list(state["passes"])
        self._given: list[int] = list(state["given"])
        self._empty: list[bool] = list(state["empty"])
        self._readers = [self._open(part, inner) for part, inner in enumerate(state["parts"])]
        self._bounds = self._cumulative_shares()

    def __next__(self) -> Any:
        while not all(self._passes):
            part = self._part()
            sample = next(self._readers[part], None)
            if sample is not None:
                self._draw += 1
                self._given[part] += 1
                return sample
            self._restart(part)
        raise StopIteration

    def state_dict(self) -> State:
        """`passes`: number of complete passes over each part; `given`: samples drawn in its current pass."""
        parts = [reader.state_dict() for reader in self._readers]
        lists = {"passes": list(self._passes), "given": list(self._given), "empty": list(self._empty)}
        return {"draw": self._draw, **lists, "parts": parts}

    def _part(self) -> int:
        block, number = divmod(self._draw, _DRAWS)
        if self._block != block:
            self._block, self._choices = block, np.random.default_rng([self._seed, self._epoch, block]).random(_DRAWS)
        part = int(np.searchsorted(self._bounds, self._choices[number], side="right"))
        return min(part, len(self._readers) - 1)

    def _cumulative_shares(self) -> NDArray[np.float64]:
        """The upper bound of each part in the interval [0, 1]."""
        shares = self._mixture.shares * ~np.asarray(self._empty)
        return np.asarray(np.cumsum(shares / (shares.sum() or 1.0)))

    def _restart(self, part: int) -> None:
        """Start the next pass over a part. A part without samples in this shard is not drawn again."""
        self._empty[part] = not self._given[part]
        self._passes[part] += 1
        self._given[part] = 0
        self._readers[part] = self._open(part, None)
        self._bounds = self._cumulative_shares()

    def _open(self, part: int, state: State | None) -> StreamReader:
        # Each pass has a different order.
        seed = self._seed + 7919 * self._passes[part]
        return self._mixture.streams[part].read(shard=self._shard, seed=seed, epoch=self._epoch, state=state)
