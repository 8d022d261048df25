"""Texts cut into passages, with the document of each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.data.text.documents import Document
from shoal.errors import ShoalError

_WORD = re.compile(r"\s*\S+")
"""A word with the white space before it, since line breaks and indentation have meaning in code and verse."""


class Passages(NamedTuple):
    """Passages, in order."""

    texts: list[str]
    documents: NDArray[np.int32]
    """The number of each passage's document."""
    origins: list[str]
    """The origin of each document: see `Document.origin`."""

    def digest(self) -> str:
        """Holds: the same passages of the same documents have the same digest on every machine."""
        found = hashlib.sha256()
        for text, document in zip(self.texts, self.documents, strict=True):
            found.update(f"{len(text)} {self.origins[document]}\n{text}".encode())
        return found.hexdigest()


def cut_passages(documents: Iterable[Document], words: int, most: int) -> Passages:
    """The first `most` passages of up to `words` words of the documents. Raises ShoalError if there are none."""
    texts: list[str] = []
    numbers: list[int] = []
    origins: dict[str, int] = {}
    for text, origin in islice(_cut_all(documents, words), most):
        texts.append(text)
        numbers.append(origins.setdefault(origin, len(origins)))
    if not texts:
        raise ShoalError("there is no text to make passages of: every document is empty")
    return Passages(texts, np.asarray(numbers, np.int32), list(origins))


def _cut_all(documents: Iterable[Document], words: int) -> Iterator[tuple[str, str]]:
    for document in documents:
        found = (match.group() for match in _WORD.finditer(document.text))
        while some := list(islice(found, words)):
            yield "".join(some).strip("\n"), document.origin
