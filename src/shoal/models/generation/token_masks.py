"""Masks over the vocabulary, with a bit for each token.

Shapes: R rows, N slots, K slots that get a mask, V vocabulary, W words of 32 bits, O octets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_BITS = 32


def words_for(vocabulary: int) -> int:
    return -(-vocabulary // _BITS)


def masked(logits_RV: Tensor, words_RW: Tensor) -> Tensor:
    """The logits, very low for tokens whose bit is 0. They stay finite, so that top-k may count such tokens. A sum has no branches: for
    masks with bits in disorder it takes a third of the time of `masked_fill`."""
    denied_RV = _denied(words_RW, logits_RV.shape[1])
    return logits_RV.add(denied_RV.to(logits_RV.dtype), alpha=torch.finfo(logits_RV.dtype).min / 2)


def _denied(words_RW: Tensor, vocabulary: int) -> Tensor:
    """1 for each token whose bit is 0."""
    if words_RW.device.type != "cpu":
        return _denied_on_gpu(words_RW, vocabulary)
    octets_RO = (~words_RW).contiguous().numpy().view(np.uint8)
    return torch.from_numpy(np.unpackbits(octets_RO, axis=1, count=vocabulary, bitorder="little"))


def _denied_on_gpu(words_RW: Tensor, vocabulary: int) -> Tensor:
    shifts = torch.arange(_BITS, dtype=torch.int32, device=words_RW.device)
    return (((words_RW.unsqueeze(2) >> shifts) & 1) ^ 1).flatten(1)[:, :vocabulary]


class SlotMasks:
    """The mask of each slot. A slot whose text follows no grammar allows all tokens."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.words_NW = torch.full((slots, words_for(vocabulary)), -1, dtype=torch.int32, device=device)
        self._set: set[int] = set()
        """Slots that a text with a mask has had."""

    def open(self, slot: int) -> None:
        """A new text allows all tokens, until a mask says otherwise."""
        if slot in self._set:
            self._set.discard(slot)
            self.words_NW[slot] = -1

    def replace(self, slots: Sequence[int], slots_K: Tensor, words_KW: Tensor) -> None:
        """The masks of the next step. `slots_K`: the same slots, on the device."""
        self._set.update(slots)
        self.words_NW[slots_K] = words_KW

    def apply(self, logits_RV: Tensor, rows_R: Tensor) -> Tensor:
        return masked(logits_RV, self.words_NW[rows_R])
