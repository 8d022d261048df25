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


Score = Callable[[Sequence[Answer]], list[float]]
"""A score for each answer."""
