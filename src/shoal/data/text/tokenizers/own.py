"""Shoal's own tokenizers: a token is a byte, or a character of the training text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.data.text.tokenizers.interface import FORMAT, OWN_FILE, Ids, Tokenizer
from shoal.errors import ShoalError

_CODES = 0x110000


class ByteTokenizer(Tokenizer):
    """256 bytes and an end-of-text id. It needs no training and encodes every text."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    pad_id = 256

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", "replace")

    def token_bytes(self) -> list[bytes]:
        return [*(bytes([number]) for number in range(256)), b"<end>"]

    def _made_files(self) -> dict[str, bytes]:
        return {OWN_FILE: FORMAT.text({"kind": "bytes"}).encode()}


class CharacterTokenizer(Tokenizer):
    """One id per distinct character, in the order of their code points. There is no end-of-text id: a line break separates documents."""

    name = "characters"
    eos_id = None
    pad_id = 0

    def __init__(self, alphabet: Iterable[str]) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        if not self.alphabet:
            raise ShoalError("the tokenizer `characters` needs a text to take its characters from, and there is none")
        self.vocab_size = len(self.alphabet)
        self._id_of_code = np.full(_CODES, -1, np.int32)
        self._id_of_code[_code_points(self.alphabet)] = np.arange(self.vocab_size)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CharacterTokenizer:
        alphabet: set[str] = set()
        count = 0
        for count, text in enumerate(texts, 1):  # noqa: B007
            alphabet.update(text)
        return cls(alphabet | {"\n"} if count > 1 else alphabet)

    @property
    def separator(self) -> tuple[int, ...]:
        return (self.alphabet.index("\n"),) if "\n" in self.alphabet else ()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        ids: Ids = self._id_of_code[_code_points(text)]
        if ids.size and ids.min() < 0:
            unknown = "".join(sorted({text[i] for i in np.flatnonzero(ids < 0)})[:10])
            raise ShoalError(f"the tokenizer `characters` does not know {unknown!r}: the text it was made from has no such character")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[int(i)] for i in ids)

    def token_bytes(self) -> list[bytes]:
        return [letter.encode("utf-8") for letter in self.alphabet]

    def _made_files(self) -> dict[str, bytes]:
        return {OWN_FILE: FORMAT.text({"kind": "characters", "alphabet": self.alphabet}).encode()}


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.dtype("<u4"))
