"""Tokenizers that only transformers can read: a name on the hub, or a folder without a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.text.tokenizers.interface import Ids, LibraryBasedTokenizer


class PretrainedTokenizer(LibraryBasedTokenizer):
    """A tokenizer of the transformers library. Special tokens are never added, and are recognised inside a text."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        self.vocab_size = max(max(tokenizer.get_vocab().values()) + 1, len(tokenizer))
        self.eos_id: int | None = tokenizer.eos_token_id
        self.pad_id: int = next((i for i in (tokenizer.pad_token_id, self.eos_id) if i is not None), 0)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        # verbose=False: its warning about long texts does not apply, since texts are cut to sequences later.
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]

    def _with_specials(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def save(self, folder: str | Path) -> None:
        self._tokenizer.save_pretrained(str(folder))
