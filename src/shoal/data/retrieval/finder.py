"""Retrieval of passages for the chunks of a text, as columns of a batch.

A sequence is cut into chunks of a fixed number of tokens. Holds: only tokens of later chunks attend to the passages of a chunk, so no token
depends on later ones; and no passage is from a document of the sequence itself.

Shapes: B batch, L tokens, U chunks with later tokens, K passages per chunk, P passages in all, M tokens per passage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from shoal.data.interfaces import Batch
from shoal.data.retrieval.encoders import Encoder, EncoderName, open_encoder
from shoal.data.retrieval.index import Index, Neighbours, open_index
from shoal.data.text.context_text import NO_TOKEN
from shoal.data.text.tokenizers import Tokenizer

_CACHED_CHUNKS = 4096
"""Size of the cache in chunks: text generation looks its earlier chunks up at every step."""


class PassageSettings(NamedTuple):
    """Number and lengths of retrieved passages."""

    top_k: int
    chunk_size: int
    """Tokens per chunk."""
    passage_tokens: int
    """Tokens of a passage that the model sees, from its beginning."""


class PassageFinder:
    """Finds passages in an index. A copy in another process opens the index again."""

    def __init__(self, folder: Path, settings: PassageSettings, tokenizer: Tokenizer, index: Index | None = None) -> None:
        self.folder, self.settings, self.tokenizer = folder, settings, tokenizer
        self._index = index
        self._encoder: Encoder | None = None
        self._cache: dict[tuple[str, ...], Neighbours] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_index": None, "_encoder": None, "_cache": {}}

    @property
    def index(self) -> Index:
        self._index = self._index or open_index(self.folder)
        return self._index

    @property
    def chunk_size(self) -> int:
        return self.settings.chunk_size

    @cached_property
    def passages_PM(self) -> torch.Tensor:
        """The tokens of every passage, and a last row of NO_TOKEN, which is row −1."""
        rows = self.tokenizer.encode_batch(self.index.passages.texts)
        table = np.full((len(rows) + 1, self.settings.passage_tokens), NO_TOKEN, np.int32)
        for target, row in zip(table, rows, strict=False):
            target[: len(row)] = row[: len(target)]
        return torch.from_numpy(table)

    def neighbours(self, texts: Sequence[Sequence[int]], origins: Sequence[Sequence[str]], chunks: int) -> Neighbours:
        """The passages [B, U, K] for the first chunks of each text, −1 where there are none. `origins`: the documents of each text."""
        found_BUK = np.full((len(texts), chunks, self.settings.top_k), -1, np.int32)
        wanted: list[tuple[int, int, tuple[str, ...]]] = []
        for row, (text, excluded) in enumerate(zip(texts, origins, strict=True)):
            for number, chunk in enumerate(self._chunks(text)[:chunks]):
                wanted.append((row, number, (chunk, *excluded)))
        new = list(dict.fromkeys(key for _, _, key in wanted if key not in self._cache and key[0].strip()))
        cache = self._cache | dict(zip(new, self._search(new), strict=True))
        for row, number, key in wanted:
            found_BUK[row, number] = cache.get(key, -1)
        self._cache = dict(list(cache.items())[-_CACHED_CHUNKS:])
        return found_BUK

    def _search(self, keys: Sequence[tuple[str, ...]]) -> Neighbours:
        if not keys:
            return np.zeros((0, self.settings.top_k), np.int32)
        self._encoder = self._encoder or open_encoder(cast(EncoderName, self.index.encoder))
        return self.index.search(self._encoder.encode([key[0] for key in keys]), self.settings.top_k, [key[1:] for key in keys])

    def _chunks(self, text: Sequence[int]) -> list[str]:
        """The chunks after which there are more tokens."""
        size = self.settings.chunk_size
        return [self.tokenizer.decode(list(text[start : start + size])) for start in range(0, len(text) - size, size)]

    def columns(self, neighbours_BUK: torch.Tensor, starts_B: torch.Tensor, width: int) -> Batch:
        """The columns `passage_ids` [B, U·K, M] and `passage_from` [B, U·K], the first token that may attend to each passage.

        `starts_B`: the first column of each text, after padding on the left; `width`: the number of columns of the batch.
        """
        size = self.settings.chunk_size
        used = max(1, (width - 1) // size)
        neighbours_BUK = neighbours_BUK[:, :used].long()
        ends_U = torch.arange(1, neighbours_BUK.shape[1] + 1) * size
        from_BUK = (starts_B[:, None] + ends_U)[:, :, None].expand_as(neighbours_BUK)
        return {"passage_ids": self.passages_PM[neighbours_BUK.flatten(1)].long(), "passage_from": from_BUK.flatten(1)}

    def batch_columns(self, batch: Batch, origins: Sequence[Sequence[str]]) -> Batch:
        """The columns for a batch."""
        texts, starts_B = texts_of(batch)
        return self._columns_for(texts, origins, starts_B, batch["input_ids"].shape[1])

    def text_columns(self, texts: Sequence[Sequence[int]], origins: Sequence[Sequence[str]], starts: Sequence[int]) -> Batch:
        """The columns for texts without padding, which begin at these columns of a batch."""
        return self._columns_for(texts, origins, torch.tensor(starts), max(map(len, texts)))

    def _columns_for(self, texts: Sequence[Sequence[int]], origins: Sequence[Sequence[str]], starts_B: torch.Tensor, width: int) -> Batch:
        found = self.neighbours(texts, origins, max(1, (width - 1) // self.settings.chunk_size))
        return self.columns(torch.from_numpy(found), starts_B, width)


def texts_of(batch: Batch) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens of each row without padding, and the column of the first one."""
    ids_BL, mask_BL = batch["input_ids"], batch.get("attention_mask")
    if mask_BL is None:
        return ids_BL.tolist(), torch.zeros(len(ids_BL), dtype=torch.int64)
    rows = [ids_L[mask_L].tolist() for ids_L, mask_L in zip(ids_BL, mask_BL, strict=True)]
    return rows, mask_BL.long().argmax(1)
