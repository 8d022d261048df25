"""A reward: answers are to be short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shoal.plugins import Answer, PositiveInt, Reward, Run, Score, builds


class Brief(Reward):
    """1 for an empty answer, and less by the same amount for each word, down to 0."""

    kind: Literal["brief"] = "brief"
    longest: PositiveInt = 20
    """Words from which on an answer is worth nothing."""


@builds(Brief)
def brief(reward: Brief, run: Run) -> Score:
    def score(answers: Sequence[Answer]) -> list[float]:
        return [max(0.0, 1 - len(answer.text.split()) / reward.longest) for answer in answers]

    return score
