"""1 for the right answer, 0 for any other."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config import Run
from shoal.config.schema.rlhf import ExactReward
from shoal.errors import ShoalError
from shoal.runs.rlhf.rewards.interface import Answer, Score


def build(settings: ExactReward, run: Run) -> Score:
    def plain(text: str) -> str:
        """The first line, without spaces around it."""
        line = text.strip().split("\n", 1)[0].strip()
        return line.casefold() if settings.ignore_case else line

    def score(answers: Sequence[Answer]) -> list[float]:
        scores = []
        for answer in answers:
            if answer.expected is None:
                raise ShoalError("the reward `exact` needs the right answers: rlhf.prompts must be JSON objects with `prompt` and `answer`")
            scores.append(float(plain(answer.text) == plain(answer.expected)))
        return scores

    return score
