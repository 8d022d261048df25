"""Several rewards, each times its weight, added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.config import Run
from shoal.config.schema.rlhf import Reward, SumReward, TrainedReward
from shoal.runs.rlhf.rewards.interface import Answer, Score, checked


def build(settings: SumReward, run: Run) -> Score:
    runs = iter(settings.runs)
    rewards = [(part.weight, _with_its_run(part.reward, runs)) for part in settings.parts]
    parts: list[tuple[float, Score]] = [(weight, checked(reward.builder()(reward, run), f"`{reward.kind}`")) for weight, reward in rewards]

    def score(answers: Sequence[Answer]) -> list[float]:
        columns = [[weight * one for one in part(answers)] for weight, part in parts]
        return [sum(row) for row in zip(*columns, strict=True)]

    return score


def _with_its_run(reward: Reward, runs: Iterator[str]) -> Reward:
    """A reward model that was trained for this run, with the folder where it is; a sum in a sum has several."""
    made = reward
    if isinstance(reward, SumReward):
        made = reward.replace(parts=tuple(part.replace(reward=_with_its_run(part.reward, runs)) for part in reward.parts))
    elif isinstance(reward, TrainedReward) and reward.run is None:
        made = reward.replace(run=next(runs, None))
    return made
