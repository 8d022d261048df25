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
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def build(settings: FunctionReward, run: Run) -> Score:
    if settings.function is None:
        raise ShoalError("rlhf.reward.function: name a function as module:function, or pass one to shoal.train as reward=")
    return score_with(import_function(settings.function))


def score_with(function: RewardFunction) -> Score:
    """The scores that a function gives to answers, one by one."""
    parameters = _parameters(function)
    taken, needed = _keywords(parameters), _needed(parameters)

    def score(answers: Sequence[Answer]) -> list[float]:
        for answer in answers:
            if missing := [name for name in needed if name not in answer.columns]:
                raise ShoalError(f"the reward {name_of(function)} takes `{missing[0]}`, and there is no such column for {answer}")
        return [_number(function, function(answer.prompt, answer.text, **_chosen(answer.columns, taken)), answer) for answer in answers]

    return score


def name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _parameters(function: RewardFunction) -> list[inspect.Parameter]:
    """What a function takes besides prompt and answer."""
    try:
        return list(inspect.signature(function).parameters.values())[2:]
    except (TypeError, ValueError):  # a function of C
        return []


def _keywords(parameters: Sequence[inspect.Parameter]) -> set[str] | None:
    """The columns that a function takes by name; None: all."""
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return None
    return {one.name for one in parameters if one.kind in _BY_NAME}


def _needed(parameters: Sequence[inspect.Parameter]) -> list[str]:
    """The columns that a function cannot be called without."""
    return [one.name for one in parameters if one.kind in _BY_NAME and one.default is inspect.Parameter.empty]


def _chosen(columns: Mapping[str, Any], taken: set[str] | None) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if taken is None or name in taken}


def _number(function: RewardFunction, found: Any, answer: Answer) -> float:
    """Raises ShoalError for what is no number."""
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        raise ShoalError(f"the reward {name_of(function)} gave {type(found).__name__} in place of a number for {answer}") from None
