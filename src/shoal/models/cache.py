"""The keys and values of tokens already seen, so that the next token costs one token's work.

Shapes: B batch, K key and value heads, L new tokens, S room for tokens, E head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class LayerCache:
    """One layer's keys and values: memory of fixed size, taken at the first write and written in place."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys_BKSE: Tensor | None = None
        self.values_BKSE: Tensor | None = None
        self.context: tuple[Any, tuple[Tensor, Tensor]] | None = None
        """The context that the layer attends to, with its keys and values."""

    def append(self, keys_BKLE: Tensor, values_BKLE: Tensor) -> tuple[Tensor, Tensor]:
        """Views of all keys and values up to and with the new ones."""
        if self.keys_BKSE is None or self.values_BKSE is None:
            B, K, _, E = keys_BKLE.shape
            self.keys_BKSE = keys_BKLE.new_empty(B, K, self.capacity, E)
            self.values_BKSE = values_BKLE.new_empty(B, K, self.capacity, E)
        start, self.length = self.length, self.length + keys_BKLE.shape[2]
        self.keys_BKSE[:, :, start : self.length] = keys_BKLE
        self.values_BKSE[:, :, start : self.length] = values_BKLE
        return self.keys_BKSE[:, :, : self.length], self.values_BKSE[:, :, : self.length]


class KeyValueCache:
    """The caches of all layers of a transformer."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]
        self.context: Any = None
        """What there is to read beside the tokens."""
        self.memory: Any = None
        """What was recalled so far."""

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.layers[0].length
