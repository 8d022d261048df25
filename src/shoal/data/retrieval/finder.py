"""Which passages a text's chunks find, as columns of a batch.

A sequence is cut into chunks of a fixed number of tokens. What is found for a chunk may be read by the tokens of later chunks only, so
nothing depends on what comes after it; and it is never of a document that the sequence is of.

Shapes: B batch, L tokens, U chunks that are read by later ones, K passages of a chunk, P passages in all, M tokens of a passage.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from shoal.data.interfaces import Batch
from shoal.data.retrieval.encoders import Encoder, EncoderName, open_encoder
from shoal.data.retrieval.index import Index, Neighbours, open_index
from shoal.data.text.context_text import NO_TOKEN
from shoal.data.text.tokenizers import Tokenizer

_REMEMBERED = 4096
"""Chunks whose passages are remembered: a text that is being written asks for its earlier chunks again and again."""


class PassageSettings(NamedTuple):
    """How passages are read."""

    top_k: int
    chunk_size: int
    """Tokens of a chunk."""
    passage_tokens: int
    """Tokens of a passage that are read, from its beginning."""


class PassageFinder:
    """Finds passages in an index. A copy that is sent to another process opens the index for itself."""

    def __init__(self, folder: Path, reading: PassageSettings, tokenizer: Tokenizer, index: Index | None = None) -> None:
        self._folder, self.reading, self.tokenizer = folder, reading, tokenizer
        self._index = index
        self._encoder: Encoder | None = None
        self._passages_PM: torch.Tensor | None = None
        self._remembered: dict[tuple[str, ...], Neighbours] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_index": None, "_encoder": None, "_remembered": {}}

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def index(self) -> Index:
        self._index = self._index or open_index(self.folder)
        return self._index

    @property
    def chunk_size(self) -> int:
        return self.reading.chunk_size

    @property
    def passages_PM(self) -> torch.Tensor:
        """The tokens of every passage, and NOTHING at the end: there −1 finds it."""
        if self._passages_PM is None:
            rows = self.tokenizer.encode_batch(self.index.passages.texts)
            table = np.full((len(rows) + 1, self.reading.passage_tokens), NO_TOKEN, np.int32)
            for place, row in zip(table, rows, strict=False):
                place[: len(row)] = row[: len(place)]
            self._passages_PM = torch.from_numpy(table)
        return self._passages_PM

    def neighbours(self, texts: Sequence[Sequence[int]], own: Sequence[Sequence[str]], chunks: int) -> Neighbours:
        """The passages [B, U, K] for the first chunks of each text, −1 where there are none. `own`: the documents of each text."""
        found_BUK = np.full((len(texts), chunks, self.reading.top_k), -1, np.int32)
        wanted: list[tuple[int, int, tuple[str, ...]]] = []
        for row, (text, origins) in enumerate(zip(texts, own, strict=True)):
            for number, chunk in enumerate(self._chunks(text)[:chunks]):
                wanted.append((row, number, (chunk, *origins)))
        new = list(dict.fromkeys(key for _, _, key in wanted if key not in self._remembered and key[0].strip()))
        remembered = self._remembered | dict(zip(new, self._search(new), strict=True))
        for row, number, key in wanted:
            found_BUK[row, number] = remembered.get(key, -1)
        self._remembered = dict(list(remembered.items())[-_REMEMBERED:])
        return found_BUK

    def _search(self, keys: Sequence[tuple[str, ...]]) -> Neighbours:
        if not keys:
            return np.zeros((0, self.reading.top_k), np.int32)
        self._encoder = self._encoder or open_encoder(cast(EncoderName, self.index.encoder))
        return self.index.search(self._encoder.encode([key[0] for key in keys]), self.reading.top_k, [key[1:] for key in keys])

    def _chunks(self, text: Sequence[int]) -> list[str]:
        """The chunks that later tokens follow."""
        size = self.reading.chunk_size
        return [self.tokenizer.decode(list(text[start : start + size])) for start in range(0, len(text) - size, size)]

    def columns(self, neighbours_BUK: torch.Tensor, starts_B: torch.Tensor, width: int) -> Batch:
        """What a model reads: `passage_ids` [B, U·K, M] and `passage_from` [B, U·K], the first token that may read each.

        `starts_B` is where each text begins, behind padding on the left; `width` is what the batch is wide.
        """
        size = self.reading.chunk_size
        used = max(1, (width - 1) // size)
        neighbours_BUK = neighbours_BUK[:, :used].long()
        ends_U = torch.arange(1, neighbours_BUK.shape[1] + 1) * size
        from_BUK = (starts_B[:, None] + ends_U)[:, :, None].expand_as(neighbours_BUK)
        return {"passage_ids": self.passages_PM[neighbours_BUK.flatten(1)].long(), "passage_from": from_BUK.flatten(1)}

    def read_beside(self, batch: Batch, own: Sequence[Sequence[str]]) -> Batch:
        """The columns for a whole batch."""
        texts, starts_B = texts_of(batch)
        return self._beside(texts, own, starts_B, batch["input_ids"].shape[1])

    def beside_texts(self, texts: Sequence[Sequence[int]], own: Sequence[Sequence[str]], starts: Sequence[int]) -> Batch:
        """The columns for texts without padding, which begin at these columns of a batch."""
        return self._beside(texts, own, torch.tensor(starts), max(map(len, texts)))

    def _beside(self, texts: Sequence[Sequence[int]], own: Sequence[Sequence[str]], starts_B: torch.Tensor, width: int) -> Batch:
        found = self.neighbours(texts, own, max(1, (width - 1) // self.reading.chunk_size))
        return self.columns(torch.from_numpy(found), starts_B, width)


def texts_of(batch: Batch) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens of each row without padding, and the place of the first."""
    ids_BL, mask_BL = batch["input_ids"], batch.get("attention_mask")
    if mask_BL is None:
        return ids_BL.tolist(), torch.zeros(len(ids_BL), dtype=torch.int64)
    rows = [ids_L[mask_L].tolist() for ids_L, mask_L in zip(ids_BL, mask_BL, strict=True)]
    return rows, mask_BL.long().argmax(1)
