"""Data whose classes are not Shoal's: of a Python program that calls Shoal, or of a plugin's data source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from shoal.config import Run
from shoal.config.schema.data import DataSource
from shoal.data.interfaces import Batch, Indices, Samples, SampleStream, State, StreamReader, as_index
from shoal.data.loaded_data import Data
from shoal.errors import ShoalError

Collate = Callable[[list[Any]], Any]
"""Makes a batch from samples: a tensor, a tuple of tensors, or a dict of tensors."""


class UserSamples(Samples):
    """A user's map-style data set."""

    def __init__(self, samples: Any, collate: Callable[[Sequence[Any]], Batch]) -> None:
        self.samples, self._collate = samples, collate

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Indices) -> Batch:
        return self._collate([self.samples[number] for number in as_index(indices).tolist()])


class UserStream(SampleStream):
    """A user's iterable data set, which may be iterated over several times. Its order is kept; shard i of n reads every n-th sample."""

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


class PluginSamples(Samples):
    """Samples of a plugin whose class has the methods of `Samples` (`order` is optional) and does not extend it."""

    def __init__(self, samples: Any) -> None:
        self._samples: Samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Indices) -> Batch:
        return self._samples.batch(indices)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        return self._samples.order(seed, epoch) if hasattr(self._samples, "order") else super().order(seed, epoch)


class PluginStream(SampleStream):
    """A stream of a plugin whose class has the methods of `SampleStream` and does not extend it."""

    def __init__(self, stream: Any) -> None:
        self._stream: SampleStream = stream

    def read(self, *, shard: tuple[int, int], seed: int, epoch: int, state: State | None = None) -> StreamReader:
        return self._stream.read(shard=shard, seed=seed, epoch=epoch, state=state)

    def collate(self, samples: Sequence[Any]) -> Batch:
        return self._stream.collate(samples)


def adapt_plugin_data(data: Data) -> Data:
    """The data of a source, with adapters for samples whose class does not extend Shoal's. Raises ShoalError."""
    held_out = None if data.eval is None else _adapt_samples(data.eval, "eval")
    if isinstance(data.train, SampleStream):
        return data._replace(eval=held_out)
    is_stream = hasattr(data.train, "read") and hasattr(data.train, "collate")
    return data._replace(train=PluginStream(data.train) if is_stream else _adapt_samples(data.train, "train"), eval=held_out)


def _adapt_samples(samples: Any, field: str) -> Samples:
    if isinstance(samples, Samples):
        return samples
    if not (hasattr(samples, "__len__") and hasattr(samples, "batch")):
        raise ShoalError(f"data.source: `{field}` of the data is of type {type(samples).__name__}, and must extend Samples")
    return PluginSamples(samples)


def stack_samples(samples: Sequence[Any]) -> Any:
    """A batch with the structure of the samples: tensors, arrays and numbers are stacked; tuples and dicts item by item."""
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
            f"`{name}` of the samples ({type(values[0]).__name__}) cannot be stacked to a batch: {error}. Pass a function as collate=, "
            "or leave such fields out"
        ) from None


def _tensor(value: Any) -> torch.Tensor:
    made = torch.as_tensor(value)
    return made.float() if made.dtype == torch.float64 else made


def refuse_live_data(source: DataSource, run: Run, request: Any) -> Any:
    """Raises ShoalError: such data exists only in the Python program that passed it to Shoal, or passed the function that makes it."""
    raise ShoalError(f"the data of this run came from a Python program (data.source.kind {source.kind}): only that program has it")
