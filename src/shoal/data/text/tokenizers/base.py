"""What the tokenizers of other people's libraries have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shoal.data.text.tokenizers.interface import Ids


class LibraryBasedTokenizer(ABC):
    """A tokenizer whose vocabulary is a library's: its end-of-text token, where it has one, stands between documents."""

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
