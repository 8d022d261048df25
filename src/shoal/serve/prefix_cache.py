"""Texts of ended requests that the model still has in its caches: a new prompt that begins like one of them is read from there on."""

from __future__ import annotations

from collections.abc import Sequence

SHORTEST = 16
"""Tokens that a text, or what two have in common, must have: to copy fewer is not worth it."""


class PrefixCache:
    """The kept texts, by the number of their request, and the one that was used last at the end. Together they are bounded."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.texts: dict[int, tuple[int, ...]] = {}

    @property
    def tokens(self) -> int:
        return sum(map(len, list(self.texts.values())))

    def longest(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """The text that has most of the prompt's beginning, and how many tokens that are. The prompt's last token is always read."""
        found = max(((_common(text, prompt[:-1]), number) for number, text in self.texts.items()), default=(0, 0))
        if found[0] < SHORTEST:
            return None
        self.texts[found[1]] = self.texts.pop(found[1])
        return found[1], found[0]

    def add(self, number: int, text: Sequence[int]) -> list[int]:
        """Keep a text. Return the requests whose caches are to be forgotten for it: shorter texts that it begins with, those that were not
        used for longest, or the text itself."""
        kept = tuple(text)
        if len(kept) < SHORTEST or len(kept) > self.most_tokens or any(_common(one, kept) == len(kept) for one in self.texts.values()):
            return [number]
        gone = [one for one, shorter in self.texts.items() if _common(shorter, kept) == len(shorter)]
        for one in gone:
            self.forget(one)
        self.texts[number] = kept
        while self.tokens > self.most_tokens:
            gone.append(next(iter(self.texts)))
            self.forget(gone[-1])
        return gone

    def forget(self, number: int) -> None:
        self.texts.pop(number, None)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(left), len(right)))
