"""Several rewards, each times its weight, added up."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config import Run
from shoal.config.schema.rlhf import SumReward
from shoal.runs.rewards.interface import Answer, Score


def build(settings: SumReward, run: Run) -> Score:
    parts: list[tuple[float, Score]] = [(part.weight, part.reward.builder()(part.reward, run)) for part in settings.parts]

    def score(answers: Sequence[Answer]) -> list[float]:
        columns = [[weight * one for one in part(answers)] for weight, part in parts]
        return [sum(row) for row in zip(*columns, strict=True)]

    return score
