"""The interface of tokenizers, and what those of other libraries share."""

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
FORMAT = JsonFormat("tokenizer", 1, ("kind",))
"""What a folder saved by a tokenizer of our own holds; other folders have the files of their library."""


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
        """Stands at the end of a document; None where the vocabulary has nothing of the kind."""
        ...

    @property
    def pad_id(self) -> int:
        """Fills up short samples. It may be an id that also means something: padding is masked, never recognised."""
        ...

    @property
    def separator(self) -> tuple[int, ...]:
        """What goes between two documents that are joined."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The same for many texts at once, and fast."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, folder: str | Path) -> None:
        """Write all that `load_tokenizer(folder)` needs."""
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
        """What the library itself puts before every text. Training in Shoal adds nothing; a model from elsewhere expects it."""
        plain, marked = self.encode("a"), self._with_specials("a")
        return tuple(marked[: marked.index(plain[0])]) if plain and plain[0] in marked else ()

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...

    @abstractmethod
    def _with_specials(self, text: str) -> list[int]: ...
