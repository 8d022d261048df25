"""Reward from a function of the user's program: function(prompt, answer, **columns of the prompt's row) gives the score of an answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.config import Run
from shoal.config.schema.rlhf import FunctionReward
from shoal.errors import ShoalError
from shoal.runs.live_objects import import_function
from shoal.runs.rlhf.rewards.interface import Answer, Score

RewardFunction = Callable[..., Any]


def build(settings: FunctionReward, run: Run) -> Score:
    if settings.function is None:
        raise ShoalError("rlhf.reward.function: name a function as module:function, or pass one to shoal.train as reward=")
    return score_with(import_function(settings.function))


def score_with(function: RewardFunction) -> Score:
    """The scores that a function gives to answers, one by one."""
    taken = _keywords(function)

    def score(answers: Sequence[Answer]) -> list[float]:
        return [_number(function, function(answer.prompt, answer.text, **_chosen(answer.columns, taken)), answer) for answer in answers]

    return score


def name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _keywords(function: RewardFunction) -> set[str] | None:
    """The columns that a function takes by name, besides prompt and answer; None: all."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function of C
        return set()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return None
    return {one.name for one in parameters[2:] if one.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)}


def _chosen(columns: Mapping[str, Any], taken: set[str] | None) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if taken is None or name in taken}


def _number(function: RewardFunction, found: Any, answer: Answer) -> float:
    """Raises ShoalError for what is no number."""
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        raise ShoalError(f"the reward {name_of(function)} gave {type(found).__name__} in place of a number for {answer}") from None
