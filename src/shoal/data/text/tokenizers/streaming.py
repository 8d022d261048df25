"""Text from ids that come one by one."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.data.text.tokenizers.interface import Tokenizer

_CONTEXT = 6
"""Tokens of the prompt that the first new ones are decoded with: some vocabularies write a space by what stands before."""
_LONGEST_WAIT = 8
"""Ids that wait for the rest of a character. A character has four bytes at most, so what is not whole by then never will be."""


class StreamedText:
    """Turns the ids that follow a prompt into text. Only the last few are decoded again for each, however long the text is."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._told = len(self._ids)
        """How many of the ids the text that was given so far ends with."""

    def add(self, token: int) -> str:
        """The text that this id adds; empty while it is half of a character."""
        self._ids.append(token)
        return self._next(len(self._ids) - self._told > _LONGEST_WAIT)

    def finish(self) -> str:
        """What was waiting for the rest of a character that never came."""
        return self._next(True)

    def _next(self, all_of_it: bool) -> str:
        before, now = self._tokenizer.decode(self._ids[: self._told]), self._tokenizer.decode(self._ids)
        if now.endswith("\ufffd") and not all_of_it:
            return ""
        self._ids, self._told = self._ids[self._told :], len(self._ids) - self._told
        return now[len(before) :]
