"""Where a text ends because it says a word that the request named."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Lets text through up to the first stop word. What may be the beginning of one waits until that is clear."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [word for word in words if word]
        self._waiting = ""
        self.found = False

    def add(self, text: str) -> str:
        """The part of the text so far that is certain not to belong to a stop word."""
        self._waiting += text
        starts = [at for word in self._words if (at := self._waiting.find(word)) >= 0]
        if starts:
            self.found = True
            return self._take(min(starts))
        return self._take(len(self._waiting) - self._beginning())

    def finish(self) -> str:
        """What waited for the rest of a stop word that never came."""
        return "" if self.found else self._take(len(self._waiting))

    def _beginning(self) -> int:
        """How many of the last letters may begin a stop word."""
        longest = min(len(self._waiting), max((len(word) - 1 for word in self._words), default=0))
        return next((n for n in range(longest, 0, -1) if any(word.startswith(self._waiting[-n:]) for word in self._words)), 0)

    def _take(self, count: int) -> str:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken
