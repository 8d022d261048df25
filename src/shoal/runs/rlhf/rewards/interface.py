"""What a reward is given, and what it gives."""

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
    """A text that was read beside the prompt."""
    own: tuple[str, ...] = ()
    """The documents that the prompt is of: no passages of them are read."""


def filled(question: str, answer: Answer) -> str:
    """A question with the texts in it. Not by str.format: the texts may have braces, too."""
    before, _, after = question.partition("{answer}")
    return before.replace("{prompt}", answer.prompt) + answer.text + after.replace("{prompt}", answer.prompt)


Score = Callable[[Sequence[Answer]], list[float]]
"""A score for each answer."""
