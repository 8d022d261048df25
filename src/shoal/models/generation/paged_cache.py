"""KV caches in pages: each request has the pages that its text needs, in any order, and texts that begin alike share pages.

Shapes: B batch, R rows of a step, T tokens of prompts, L new tokens, N slots, P pages of a request, G pages of the pool, W tokens of a
page, H query heads, K key and value heads, S tokens seen, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.generation.kv_cache import LayerCache

PAGE = 64
"""Tokens of a page."""


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


class PagePool:
    """The pages of all layers. Page 0 belongs to no request: tokens that stand for none are written there."""

    def __init__(self, layers: int, heads: int, head_size: int, pages: int, dtype: torch.dtype, device: torch.device) -> None:

        def buffer() -> Tensor:
            return torch.zeros(pages + 1, heads, PAGE, head_size, dtype=dtype, device=device)

        # Zeros, since what is masked is multiplied by 0, and 0 · NaN is NaN
        self.layers = [(buffer(), buffer()) for _ in range(layers)]
        self._free = list(range(pages, 0, -1))
        self._uses = [0] * (pages + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages for one request; there must be enough free ones."""
        taken = [self._free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Count one more use of these pages."""
        for page in pages:
            self._uses[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Count one use less; a page without use is free."""
        for page in pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of a page."""
        for buffers in self.layers:
            for buffer in buffers:
                buffer[target, :, :tokens] = buffer[source, :, :tokens]


class PageTables(NamedTuple):
    """Which pages each slot has, and how many tokens they hold."""

    rows_R: Tensor
    """The slot of each row."""
    lengths_N: Tensor
    tables_NP: Tensor


class DecodingLayer(LayerCache):
    """The pages of one layer, to which each row appends one token."""

    attends = True

    def __init__(self, keys_GKWE: Tensor, values_GKWE: Tensor, tables: PageTables, kernel: bool) -> None:
        super().__init__(0)
        self.keys_GKWE, self.values_GKWE, self.kernel = keys_GKWE, values_GKWE, kernel
        self.rows_R, self.lengths_N, self.tables_NP = tables

    def attend(self, query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor) -> Tensor:
        if not self.kernel:
            return self._attend_plainly(query_BHLE, key_BKLE, value_BKLE)
        from shoal.models.kernels.paged_attention import attend_to_pages

        heads = (one.squeeze(2) for one in (query_BHLE, key_BKLE, value_BKLE))
        return attend_to_pages(*heads, self.keys_GKWE, self.values_GKWE, self.rows_R, self.lengths_N, self.tables_NP).unsqueeze(2)

    def _attend_plainly(self, query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor) -> Tensor:
        lengths_R, tables_RP = self.lengths_N[self.rows_R], self.tables_NP[self.rows_R]
        pages_R, places_R = tables_RP.gather(1, (lengths_R // PAGE)[:, None]).squeeze(1), lengths_R % PAGE
        self.keys_GKWE[pages_R, :, places_R] = key_BKLE.squeeze(2)
        self.values_GKWE[pages_R, :, places_R] = value_BKLE.squeeze(2)
        tables_RP = tables_RP[:, : int(lengths_R.max()) // PAGE + 1]
        seen_RS = torch.arange(tables_RP.shape[1] * PAGE, device=lengths_R.device) <= lengths_R[:, None]
        keys, values = (gathered(buffer, tables_RP) for buffer in (self.keys_GKWE, self.values_GKWE))
        return _attention(query_BHLE, keys, values, seen_RS[:, None, None])


class PromptTokens(NamedTuple):
    """Tokens of prompts in one row, request after request."""

    slots_T: Tensor
    """The slot of each token; 0: padding."""
    positions_T: Tensor
    tables_NP: Tensor
    parts: Sequence[tuple[int, int, int, int]]
    """Of each request: its slot, its first token in the row, how many there are, and the position of the first."""


class ReadingLayer(LayerCache):
    """The pages of one layer, to which prompts append tokens."""

    attends = True

    def __init__(self, keys_GKWE: Tensor, values_GKWE: Tensor, tokens: PromptTokens, kernel: bool) -> None:
        super().__init__(0)
        self.keys_GKWE, self.values_GKWE, self.kernel = keys_GKWE, values_GKWE, kernel
        self.slots_T, self.positions_T, self.tables_NP, self.parts = tokens

    def attend(self, query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor) -> Tensor:
        if not self.kernel:
            return self._attend_plainly(query_BHLE, key_BKLE, value_BKLE)
        from shoal.models.kernels.paged_attention import read_to_pages

        heads = (one.squeeze(0).transpose(0, 1) for one in (query_BHLE, key_BKLE, value_BKLE))
        pages = (self.keys_GKWE, self.values_GKWE, self.slots_T, self.positions_T, self.tables_NP)
        return read_to_pages(*heads, *pages).transpose(0, 1).unsqueeze(0)

    def _attend_plainly(self, query_BHLE: Tensor, key_BKLE: Tensor, value_BKLE: Tensor) -> Tensor:
        attended_BHLE = torch.zeros_like(query_BHLE)
        for slot, first, length, start in self.parts:
            own, places = slice(first, first + length), self.positions_T[first : first + length]
            pages = self.tables_NP[slot, places // PAGE]
            for buffer, new_BKLE in ((self.keys_GKWE, key_BKLE), (self.values_GKWE, value_BKLE)):
                buffer[pages, :, places % PAGE] = new_BKLE[0, :, own].transpose(0, 1)
            table_1P = self.tables_NP[slot : slot + 1, : pages_for(start + length)]
            keys, values = (gathered(buffer, table_1P)[:, :, : start + length] for buffer in (self.keys_GKWE, self.values_GKWE))
            seen_LS = torch.ones(length, start + length, dtype=torch.bool, device=keys.device).tril(start)
            attended_BHLE[:, :, own] = _attention(query_BHLE[:, :, own], keys, values, seen_LS)
        return attended_BHLE


def gathered(buffer_GKWE: Tensor, tables_BP: Tensor) -> Tensor:
    """Keys or values [B, K, S, E] of some pages in a row."""
    return buffer_GKWE[tables_BP].transpose(1, 2).flatten(2, 3)


def _attention(query_BHLE: Tensor, keys_BKSE: Tensor, values_BKSE: Tensor, mask: Tensor) -> Tensor:
    """With a mask and grouped queries torch takes its slow path, so each query head gets its own keys."""
    groups = query_BHLE.shape[1] // keys_BKSE.shape[1]
    keys_BHSE, values_BHSE = (one.repeat_interleave(groups, 1) if groups > 1 else one for one in (keys_BKSE, values_BKSE))
    return F.scaled_dot_product_attention(query_BHLE, keys_BHSE, values_BHSE, attn_mask=mask)
