"""The base class of all tokenizers."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shoal.data.text.tokenizers.files import special_tokens_in, templates_in, with_template, write_files
from shoal.errors import ShoalError
from shoal.files import JsonFormat

Ids = NDArray[np.int32]
Learned = NDArray[np.bool_]
"""Which tokens the model learns to write."""
Spans = Sequence[tuple[int, int]]
"""Ranges of letters of a text."""
OWN_FILE = "shoal_tokenizer.json"
"""File of Shoal's own tokenizers in a saved folder; other tokenizers save the files that they came with."""
CHAT_TIME_FILE = "shoal_chat_time.json"
"""File of a run's tokenizer: the time that its chat template reads as long as the run lasts."""
CHAT_TIME = JsonFormat("chat time", 1, ("time",))
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

    chat_time: str | None = None
    """The time that chat templates read in the run whose folder it came from."""

    @property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates that it came with, by name; `default` is the one of ordinary conversations. Raises ShoalError."""
        return templates_in(self.files)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that chat templates read, such as `bos_token`, by name."""
        return special_tokens_in(self.files)

    def with_chat_template(self, source: str) -> Self:
        """The same tokenizer with this template in place of those that it came with."""
        changed = copy.copy(self)
        changed.files = with_template(self.files, source)
        return changed

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

    def encode_learned(self, texts: Sequence[tuple[str, Spans]]) -> list[tuple[Ids, Learned]]:
        """The tokens of texts, and which of them have a letter within the text's ranges. Raises ShoalError."""
        encoded = self.encode_batch([text for text, _ in texts])
        return [(ids, self._learned(text, ids, spans)) for (text, spans), ids in zip(texts, encoded, strict=True)]

    def _learned(self, text: str, ids: Ids, spans: Spans) -> Learned:
        """Without the places of tokens: those before a letter are those that the text up to there begins with, too."""
        learned = np.zeros(len(ids), np.bool_)
        for start, end in spans:
            first, after = self._boundary(text, ids, start), self._boundary(text, ids, end)
            learned[first[0] : after[1]] = True
        return learned

    def _boundary(self, text: str, ids: Ids, letter: int) -> tuple[int, int]:
        """How many tokens lie wholly before a letter, and how many begin before it."""
        if letter in (0, len(text)):
            return (0, 0) if letter == 0 else (len(ids), len(ids))
        before = self.encode_batch([text[:letter]])[0]
        shorter = min(len(before), len(ids))
        same = int(np.cumprod(before[:shorter] == ids[:shorter]).sum())
        return same, same + (same < len(before))

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str: ...

    def token_bytes(self) -> list[bytes] | None:
        """The bytes of each token, by id; None: they are not known here."""
        return None

    def as_json(self) -> str | None:
        """The content of a tokenizer.json that encodes as this tokenizer does; None: there is none."""
        return None

    def save(self, folder: str | Path) -> None:
        """Write the files that it came with, byte for byte, and what else `load_tokenizer(folder)` needs."""
        write_files(Path(folder), {**self._made_files(), **self.files})

    def save_for_run(self, folder: Path) -> None:
        """Save it with the time of the run's chat template."""
        self.save(folder)
        if self.chat_time is not None:
            CHAT_TIME.write(folder / CHAT_TIME_FILE, {"time": self.chat_time})

    @abstractmethod
    def _made_files(self) -> dict[str, bytes]:
        """The files to save of a tokenizer that came without files; empty for one that came with them."""


def chat_time(value: object, where: object) -> str:
    """A time as templates read it. Raises ShoalError."""
    try:
        return datetime.fromisoformat(str(value)).isoformat(timespec="seconds")
    except ValueError:
        raise ShoalError(f"{where}: {value!r:.40} is no time such as 2026-11-19T10:00:00") from None
