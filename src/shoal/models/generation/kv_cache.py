"""KV cache: the keys and values of tokens already seen, so that the next token costs one token's work.

Shapes: B batch, K key and value heads, L new tokens, S capacity in tokens, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

_ROOM = 128
"""Least number of tokens by which a full cache grows."""


def padded_rows(rows: Sequence[Tensor], room: int = 0) -> Tensor:
    """Keys or values [1, K, L, E] of several rows as one [B, K, S, E], padded with zeros on the left."""
    longest = max(row.shape[2] for row in rows)
    _, K, _, E = rows[0].shape
    joined_BKSE = rows[0].new_zeros(len(rows), K, longest + room, E)
    for i, row in enumerate(rows):
        joined_BKSE[i, :, longest - row.shape[2] : longest] = row[0]
    return joined_BKSE


def mask_of_rows(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The attention mask [B, S] of rows that are padded on the left."""
    lengths_B1 = torch.tensor(lengths, device=device)[:, None]
    return (torch.arange(max(lengths), device=device) >= max(lengths) - lengths_B1).long()


class LayerCache:
    """Keys and values of one layer in a preallocated buffer, which is written in place."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys_BKSE: Tensor | None = None
        self.values_BKSE: Tensor | None = None
        self.context: tuple[Any, tuple[Tensor, Tensor]] | None = None
        """The cross-attention context, with its keys and values."""

    def append(self, keys_BKLE: Tensor, values_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        """Views of all keys and values up to and with the new ones."""
        if self.keys_BKSE is None or self.values_BKSE is None:
            B, K, _, E = keys_BKLE.shape
            self.keys_BKSE = keys_BKLE.new_empty(B, K, self.capacity, E)
            self.values_BKSE = values_BKLE.new_empty(B, K, self.capacity, E)
        start, self.length = self.length, self.length + keys_BKLE.shape[2]
        if self.length > self.capacity:
            self._grow(max(self.length, self.capacity + _ROOM))
        self.keys_BKSE[:, :, start : self.length] = keys_BKLE
        self.values_BKSE[:, :, start : self.length] = values_BKLE
        return self.keys_BKSE[:, :, : self.length], self.values_BKSE[:, :, : self.length]

    def _grow(self, capacity: int) -> None:
        assert self.keys_BKSE is not None
        assert self.values_BKSE is not None
        more = (0, 0, 0, capacity - self.capacity)
        self.keys_BKSE, self.values_BKSE = (torch.nn.functional.pad(one, more) for one in (self.keys_BKSE, self.values_BKSE))
        self.capacity = capacity

    def row(self, i: int, length: int) -> LayerCache:
        """The last tokens of one row as a cache that shares this memory; `joined` copies it."""
        assert self.keys_BKSE is not None
        assert self.values_BKSE is not None
        part = LayerCache(length)
        part.length = length
        part.keys_BKSE = self.keys_BKSE[i : i + 1, :, self.length - length : self.length]
        part.values_BKSE = self.values_BKSE[i : i + 1, :, self.length - length : self.length]
        return part

    @classmethod
    def joined(cls, rows: Sequence[LayerCache]) -> LayerCache:
        """Several rows as one cache, padded on the left, with free capacity."""
        whole = [row.row(0, row.length) for row in rows]
        longest = max(row.length for row in rows)
        made = cls(longest + _ROOM)
        made.length = longest
        made.keys_BKSE = padded_rows([row.keys_BKSE for row in whole if row.keys_BKSE is not None], _ROOM)
        made.values_BKSE = padded_rows([row.values_BKSE for row in whole if row.values_BKSE is not None], _ROOM)
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
        """Keep the first `length` tokens. Rows must not be padded."""
        for layer in self.layers:
            layer.length = length

    def row(self, i: int, length: int) -> Self:
        """The last tokens of one row, as a cache of its own."""
        made = type(self)(0, length)
        made.layers = [layer.row(i, length) for layer in self.layers]
        return made

    @classmethod
    def joined(cls, rows: Sequence[Self]) -> Self:
        """The caches of several rows as one."""
        made = cls(0, 0)
        made.layers = [LayerCache.joined(layers) for layers in zip(*(row.layers for row in rows), strict=True)]
        return made
