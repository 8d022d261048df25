"""What every tokenizer can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
OWN_FILE = "shoal_tokenizer.json"
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
