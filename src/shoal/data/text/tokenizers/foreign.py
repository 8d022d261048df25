"""What the tokenizers of other people's libraries have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shoal.data.text.tokenizers.interface import Ids


class Foreign(ABC):
    """A tokenizer whose vocabulary is a library's: its end-of-text token, where it has one, stands between documents."""

    eos_id: int | None

    @property
    def separator(self) -> tuple[int, ...]:
        return () if self.eos_id is None else (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.encode_batch([text])[0]]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
