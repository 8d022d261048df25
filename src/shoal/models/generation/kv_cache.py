"""KV cache: the keys and values of tokens already seen, so that the next token costs one token's work.

Shapes: B batch, H query heads, K key and value heads, L new tokens, S capacity in tokens, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

_LEAST_GROWTH = 128
"""Least number of tokens by which a full cache grows."""


def padded_rows(rows: Sequence[Tensor], extra_columns: int = 0) -> Tensor:
    """Keys or values [1, K, L, E] of several rows as one [B, K, S, E], zero-padded on the left, and by `extra_columns` on the right."""
    longest = max(row.shape[2] for row in rows)
    _, K, _, E = rows[0].shape
    joined_BKSE = rows[0].new_zeros(len(rows), K, longest + extra_columns, E)
    for i, row in enumerate(rows):
        joined_BKSE[i, :, longest - row.shape[2] : longest] = row[0]
    return joined_BKSE


def mask_of_rows(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The attention mask [B, S] of rows that are padded on the left."""
    lengths_B1 = torch.tensor(lengths, device=device)[:, None]
    return (torch.arange(max(lengths), device=device) >= max(lengths) - lengths_B1).long()


class LayerCache:
    """Keys and values of one layer in a preallocated buffer, which is written in place."""

    attends = False
    """Whether it computes the attention itself, with `attend`, in place of `append`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys_and_values: list[Tensor] = []
        """Two buffers [B, K, S, E]; none before the first tokens."""
        self.context: tuple[Any, tuple[Tensor, Tensor]] | None = None
        """The cross-attention context, with its keys and values."""

    def append(self, keys_BKLE: Tensor, values_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        """Views of all keys and values up to and with the new ones."""
        (B, K, L, E), new, start = keys_BKLE.shape, (keys_BKLE, values_BKLE), self.length
        if not self.keys_and_values:
            self.keys_and_values = [one.new_empty(B, K, self.capacity, E) for one in new]
        self.extend(L)
        for buffer, one in zip(self.keys_and_values, new, strict=True):
            buffer[:, :, start : self.length] = one
        keys_BKSE, values_BKSE = (buffer[:, :, : self.length] for buffer in self.keys_and_values)
        return keys_BKSE, values_BKSE

    def extend(self, count: int) -> None:
        """Count more tokens, whose keys and values are written next. Buffers that are full grow."""
        self.length += count
        if self.length > self.capacity:
            missing = max(self.length - self.capacity, _LEAST_GROWTH)
            self.keys_and_values = [torch.nn.functional.pad(buffer, (0, 0, 0, missing)) for buffer in self.keys_and_values]
            self.capacity += missing

    def attend(self, query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor) -> Tensor:
        """Append the new keys and values, and attend to all [B, H, L, E]."""
        raise NotImplementedError

    def row(self, i: int, length: int) -> LayerCache:
        """The last tokens of one row as a cache that shares this memory; `joined` copies it."""
        part = LayerCache(length)
        part.length = length
        part.keys_and_values = [buffer[i : i + 1, :, self.length - length : self.length] for buffer in self.keys_and_values]
        return part

    def select(self, columns: Tensor) -> LayerCache:
        """The tokens of these numbers alone, as a copy."""
        part = LayerCache(len(columns))
        part.length = len(columns)
        part.keys_and_values = [buffer[:, :, columns] for buffer in self.keys_and_values]
        return part

    @classmethod
    def joined(cls, rows: Sequence[LayerCache]) -> LayerCache:
        """Several rows as one cache, padded on the left, with free capacity."""
        whole = [row.row(0, row.length).keys_and_values for row in rows]
        longest = max(row.length for row in rows)
        made = cls(longest + _LEAST_GROWTH)
        made.length = longest
        made.keys_and_values = [padded_rows(buffers, _LEAST_GROWTH) for buffers in zip(*whole, strict=True)]
        return made


class KeyValueCache:
    """The caches of all layers of a transformer."""

    padded = True
    """Joined rows are padded on the left: the model needs a mask."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]
        self.context: Any = None
        """The encoded context for cross-attention."""
        self.memory: Any = None
        """What the episodic memory has retrieved so far."""
        self.value_B: Any = None
        """Output of the value head at the last logits; None: the model has none."""

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.layers[0].length

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, padding counted."""
        for layer in self.layers:
            layer.length = length

    def row(self, i: int, length: int) -> Self:
        """The last tokens of one row, as a cache of its own."""
        made = type(self)(0, length)
        made.layers = [layer.row(i, length) for layer in self.layers]
        return made

    def select(self, columns: Tensor) -> Self:
        """The tokens of these numbers alone, as a copy."""
        made = type(self)(0, 0)
        made.layers = [layer.select(columns) for layer in self.layers]
        return made

    @classmethod
    def joined(cls, rows: Sequence[Self]) -> Self:
        """The caches of several rows as one."""
        made = cls(0, 0)
        made.layers = [LayerCache.joined(layers) for layers in zip(*(row.layers for row in rows), strict=True)]
        return made
