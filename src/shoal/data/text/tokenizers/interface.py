"""The base class of all tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from shoal.data.text.tokenizers.files import write_files
from shoal.files import JsonFormat

Ids = NDArray[np.int32]
OWN_FILE = "shoal_tokenizer.json"
"""File of Shoal's own tokenizers in a saved folder; other tokenizers save the files that they came with."""
FORMAT = JsonFormat("tokenizer", 1, ("kind",))


class Tokenizer(ABC):
    """Turns text into ids and back."""

    name: str
    vocab_size: int
    """One more than the highest id."""
    eos_id: int | None
    """End-of-text id; None if the vocabulary has none."""
    pad_id: int
    """Padding id. It may also be an ordinary id, since padding is masked and never recognised by its id."""
    files: Mapping[str, bytes] = MappingProxyType({})
    """The files that it came with, by their names in a folder."""

    @property
    def separator(self) -> tuple[int, ...]:
        """The ids between two concatenated documents: the end-of-text id, where there is one."""
        return () if self.eos_id is None else (self.eos_id,)

    @property
    def opening(self) -> tuple[int, ...]:
        """The ids that a library puts before every text."""
        return ()

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.encode_batch([text])[0]]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode many texts, faster than one by one."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str: ...

    def as_json(self) -> str | None:
        """The content of a tokenizer.json that encodes as this tokenizer does; None: there is none."""
        return None

    def save(self, folder: str | Path) -> None:
        """Write the files that it came with, byte for byte, and what else `load_tokenizer(folder)` needs."""
        write_files(Path(folder), {**self._made_files(), **self.files})

    @abstractmethod
    def _made_files(self) -> dict[str, bytes]:
        """The files to save of a tokenizer that came without files; empty for one that came with them."""
