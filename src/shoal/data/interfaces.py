"""The interfaces of data: batches, numbered samples, streams that can be read from any position, feeds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

Batch = dict[str, torch.Tensor]
"""Images: `image` (float32 [B, C, H, W], 0..1), `label` (int64 [B], where there are labels).
Text: `input_ids` and `labels` (int64 [B, T]), `attention_mask` (bool [B, T], where there is padding).
Rows of several whole documents: `document_lengths` (int64 [B, M], the tokens of each document, 0 where there are no more; the rest of a
row is padding).
`labels[b, t]` is the token that follows `input_ids[b, t]`, or IGNORED where there is none or it must not count.
For cross-attention: `context_ids` (int64 [B, 1, C]), `passage_ids` (int64 [B, P, M]) and `passage_from` (int64 [B, P], the first token
that may attend to each passage); −1 where there is no token."""

IGNORED = -100
Indices = Sequence[int] | torch.Tensor
State = dict[str, Any]
Progress = Callable[[str, int, int | None], None]
"""Called while downloading with the name of the download, the bytes received, and the total bytes (None: unknown)."""


class Feed(Iterator[Batch]):
    """Training batches, from a position that can be saved."""

    batches_per_epoch: int | None = None
    """None: unknown, as for a stream."""
    epochs: int | None = None
    """Number of epochs; None: `training.epochs` decides."""
    epoch: int = 0
    figures: Mapping[str, float] = {}
    """Metrics of the feed's own batches, recorded together with the losses."""

    @property
    def at_epoch_end(self) -> bool:
        """Whether the next batch belongs to another epoch."""
        return False

    @abstractmethod
    def __next__(self) -> Batch: ...

    @abstractmethod
    def state_dict(self) -> State:
        """The position: at least `epoch`, and `position`, the number of batches of that epoch that were consumed."""

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot resume from a saved position")

    def close(self) -> None:
        """End the threads or processes that load ahead."""
        return

    # --- for feeds that make their own batches ---------------------------------------------------------

    def start(self, warn: Callable[[str], None], new: bool) -> None:
        """Called once before training begins. `warn` shows a warning to the user; `new`: the run is not resumed."""
        return

    def evaluation_batches(self, held_out: Callable[[], Iterator[Batch]] | None) -> Callable[[], Iterator[Batch]] | None:
        """The batches of an evaluation: the held-out data, unless the feed makes its own. None: there is no evaluation."""
        return held_out

    def for_copy(self, task: Any) -> Feed:
        """The feed of a copy of the task, which is evaluated while the task itself learns."""
        return self

    def sample_writer(self) -> Callable[[Path], None] | None:
        """Writes samples of the model's output to a text file after an evaluation. None: the task writes them."""
        return None


class Samples(ABC):
    """A set of samples, each with a number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: Indices) -> Batch: ...

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        """The sample numbers of an epoch, in the order in which they are read: the same on every machine. A mixture may repeat numbers or
        leave some out."""
        return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(len(self)))


class SelectableSamples(Samples):
    """Samples of which a subset can be taken."""

    @abstractmethod
    def select(self, indices: torch.Tensor) -> Self: ...


class StreamReader(Iterator[Any]):
    """One pass over one shard of a stream, sample by sample."""

    @abstractmethod
    def state_dict(self) -> State:
        """The reader's position, as a small JSON-able value. A reader opened with it continues with the very next sample."""


class SampleStream(ABC):
    """Samples that are read one after the other, shuffled over a buffer."""

    @abstractmethod
    def read(self, *, shard: tuple[int, int], seed: int, epoch: int, state: State | None = None) -> StreamReader:
        """Read shard `index` of `count`. Shards do not overlap, and together they are the whole stream."""

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> Batch: ...


def as_index(indices: Indices) -> torch.Tensor:
    return indices if isinstance(indices, torch.Tensor) else torch.as_tensor(indices, dtype=torch.int64)
