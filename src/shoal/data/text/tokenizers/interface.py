"""The interface of tokenizers, and the base class of those of other libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.files import JsonFormat

Ids = NDArray[np.int32]
OWN_FILE = "shoal_tokenizer.json"
"""File of Shoal's own tokenizers in a saved folder; other tokenizers save the files of their library."""
FORMAT = JsonFormat("tokenizer", 1, ("kind",))


class Tokenizer(Protocol):
    """Turns text into ids and back."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    @property
    def eos_id(self) -> int | None:
        """End-of-text id; None if the vocabulary has none."""
        ...

    @property
    def pad_id(self) -> int:
        """Padding id. It may also be an ordinary id, since padding is masked and never recognised by its id."""
        ...

    @property
    def separator(self) -> tuple[int, ...]:
        """The ids between two concatenated documents."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode many texts, faster than one by one."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, folder: str | Path) -> None:
        """Write all files that `load_tokenizer(folder)` needs."""
        ...


class LibraryBasedTokenizer(ABC):
    """A tokenizer of another library. Its end-of-text token, where it has one, separates documents."""

    eos_id: int | None

    @property
    def separator(self) -> tuple[int, ...]:
        return () if self.eos_id is None else (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.encode_batch([text])[0]]

    @property
    def opening(self) -> tuple[int, ...]:
        """The ids that the library puts before every text. Shoal's training adds none; pretrained models expect them."""
        plain, with_specials = self.encode("a"), self._with_specials("a")
        return tuple(with_specials[: with_specials.index(plain[0])]) if plain and plain[0] in with_specials else ()

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...

    @abstractmethod
    def _with_specials(self, text: str) -> list[int]: ...
