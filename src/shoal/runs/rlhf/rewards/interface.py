"""Interface of rewards: answers in, scores out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Answer(NamedTuple):
    """An answer to a prompt."""

    prompt: str
    text: str
    expected: str | None = None
    """The right answer, where the prompts' file has one."""
    context: str = ""
    """The text that the policy read beside the prompt."""
    own: tuple[str, ...] = ()
    """The documents that the prompt comes from: no passages of them are read."""


def filled(question: str, answer: Answer) -> str:
    """A question with the texts in it. Not by str.format: the texts may have braces, too."""
    before, _, after = question.partition("{answer}")
    return before.replace("{prompt}", answer.prompt) + answer.text + after.replace("{prompt}", answer.prompt)


Score = Callable[[Sequence[Answer]], list[float]]
"""A score for each answer."""
