"""Incremental decoding of ids to text."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.data.text.tokenizers.interface import Tokenizer

_CONTEXT = 6
"""Prompt tokens that are decoded together with the first new ones: in some vocabularies a space depends on the token before."""
_LONGEST_WAIT = 8
"""Ids that are held back for the rest of a character."""
_LONGEST_BEGINNING = 3
"""Ids that may be the beginning of a character, which has at most four bytes. What is before them is valid by now, or never will be."""

_MOST_SEARCHED = 2000
"""Ids among which one of a single letter is looked for."""


class StreamedText:
    """Decodes the ids after a prompt one by one. For each, only the last few are decoded again, however long the text is."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._emitted = len(self._ids)
        """Number of the kept ids whose text was returned already."""

    def add(self, *tokens: int) -> str:
        """The text that these ids add; empty while a character is incomplete."""
        waited = len(self._ids) - self._emitted
        self._ids.extend(tokens)
        now = self._tokenizer.decode(self._ids)
        if not now.endswith("\ufffd"):
            return self._take(len(self._ids), now)
        if waited < _LONGEST_WAIT:
            return ""
        sure = len(self._ids) - _LONGEST_BEGINNING
        for count in range(sure, max(self._emitted, sure - 1 - _LONGEST_BEGINNING), -1):  # a character may lie across three cuts
            if now.startswith(text := self._tokenizer.decode(self._ids[:count])):
                return self._take(count, text)
        return self._take(len(self._ids), now)

    def finish(self) -> str:
        """The text that was held back for the rest of a character."""
        return self._take(len(self._ids), self._tokenizer.decode(self._ids))

    def _take(self, count: int, text: str) -> str:
        """What the first `count` ids, with this text, add to those that were returned already."""
        before = self._tokenizer.decode(self._ids[: self._emitted])
        self._ids, self._emitted = self._ids[self._emitted :], count - self._emitted
        return text[len(before) :]


class TokenTexts:
    """The text of single tokens as they stand within a text. A SentencePiece decoder removes the space at the beginning of a text, so a
    token is decoded after a letter."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        letters = ((token, tokenizer.decode([token])) for token in range(min(tokenizer.vocab_size, _MOST_SEARCHED)))
        token, letter = next(((token, text) for token, text in letters if len(text) == 1 and text.isascii() and text.isalpha()), (None, ""))
        self._before, self._letter = [] if token is None else [token], letter

    def __getitem__(self, token: int) -> str:
        text = self._tokenizer.decode([*self._before, token])
        return text.removeprefix(self._letter) if text.startswith(self._letter) else self._tokenizer.decode([token])
