"""A reward for positive answers, scored by a list of words and a few rules (VADER)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.config import Run
from shoal.config.schema.rlhf import SentimentReward
from shoal.errors import ShoalError
from shoal.runs.rlhf.rewards.interface import Answer, Score


def build(settings: SentimentReward, run: Run) -> Score:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise ShoalError("the reward `sentiment` needs vaderSentiment: pip install 'shoal[rlhf]'") from None
    analyzer: Any = SentimentIntensityAnalyzer()

    def score(answers: Sequence[Answer]) -> list[float]:
        return [float(analyzer.polarity_scores(answer.text)["compound"]) for answer in answers]

    return score
