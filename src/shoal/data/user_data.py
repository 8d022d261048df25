"""Data that a program brings along: samples with numbers, or something to iterate over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from shoal.config import Run
from shoal.config.schema.data import DataSource
from shoal.data.interfaces import Batch, Indices, Samples, SampleStream, State, StreamReader, as_index
from shoal.errors import ShoalError

Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples: a tensor, a tuple of tensors, or tensors by name."""


class UserSamples(Samples):
    """A user's map-style data set."""

    def __init__(self, samples: Any, collate: Callable[[Sequence[Any]], Batch]) -> None:
        self.samples, self._collate = samples, collate

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Indices) -> Batch:
        return self._collate([self.samples[number] for number in as_index(indices).tolist()])


class UserStream(SampleStream):
    """Something that can be iterated over again and again. Its order is its own business; shards take turns at its samples."""

    def __init__(self, samples: Iterable[Any], collate: Callable[[Sequence[Any]], Batch]) -> None:
        self.samples, self._collate = samples, collate

    def read(self, *, shard: tuple[int, int], seed: int, epoch: int, state: State | None = None) -> UserReader:
        return UserReader(self.samples, shard, state["read"] if state else 0)

    def collate(self, samples: Sequence[Any]) -> Batch:
        return self._collate(samples)


class UserReader(StreamReader):
    """One pass over one shard."""

    def __init__(self, samples: Iterable[Any], shard: tuple[int, int], read: int) -> None:
        index, count = shard
        self._samples, self._read = islice(samples, index + read * count, None, count), read

    def __next__(self) -> Any:
        sample = next(self._samples)
        self._read += 1
        return sample

    def state_dict(self) -> State:
        return {"read": self._read}


def stack_samples(samples: Sequence[Any]) -> Any:
    """Samples as a batch of the same form: tensors, arrays and numbers are stacked, tuples and dicts item by item."""
    first = samples[0]
    if isinstance(first, dict):
        return {name: _stack([sample[name] for sample in samples], str(name)) for name in first}
    if isinstance(first, (tuple, list)) and not _is_numbers(first):
        return tuple(_stack(list(values), f"[{number}]") for number, values in enumerate(zip(*samples, strict=True)))
    return _stack(list(samples), "the sample")


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, (int, float)) for item in value)


def _stack(values: list[Any], name: str) -> torch.Tensor:
    try:
        return torch.stack([value if isinstance(value, torch.Tensor) else _tensor(value) for value in values])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShoalError(
            f"`{name}` of the samples ({type(values[0]).__name__}) cannot be made a batch: {error}. collate= can say how, "
            "or leave such fields out"
        ) from None


def _tensor(value: Any) -> torch.Tensor:
    made = torch.as_tensor(value)
    return made.float() if made.dtype == torch.float64 else made


def refuse_live_data(source: DataSource, run: Run, request: Any) -> Any:
    """Raises ShoalError: such data is brought along by a program, or made by a function, and by nothing else."""
    raise ShoalError(f"the data of this run came from a Python program (data.source.kind {source.kind}): only that program has it")
