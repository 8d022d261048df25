"""Interface of rewards: answers in, scores out. `checked` refuses scores that are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.config.fields import EMPTY
from shoal.data.text.documents import Conversation
from shoal.errors import ShoalError, printable

_SHOWN = 60
"""Letters of a prompt and an answer in a message."""


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
    columns: Mapping[str, Any] = EMPTY
    """The other columns of the prompt's row; its `answer` is called `expected`."""
    where: str = ""
    """File and line of the prompt, where it has them."""
    conversation: Conversation | None = None
    """Where the prompt is a conversation: its messages. `prompt` is then the dialogue in plain words."""

    def __str__(self) -> str:
        prompt, text = (printable(one if len(one) <= _SHOWN else f"{one[:_SHOWN]}…") for one in (self.prompt, self.text))
        return f"{f'{self.where}, ' if self.where else ''}the prompt {prompt!r} and the answer {text!r}"

    def whole(self) -> Conversation | None:
        """The conversation with the answer; None: the prompt is a text."""
        chat = self.conversation
        return chat and chat._replace(
            messages=[*chat.messages, {"role": "assistant", "content": self.text}], prompt_messages=len(chat.messages)
        )


def filled(question: str, answer: Answer) -> str:
    """A question with the texts in it. Not by str.format: the texts may have braces, too."""
    before, _, after = question.partition("{answer}")
    return before.replace("{prompt}", answer.prompt) + answer.text + after.replace("{prompt}", answer.prompt)


Score = Callable[[Sequence[Answer]], list[float]]
"""A score for each answer."""


def checked(score: Score, name: str) -> Score:
    """The same scores. Raises ShoalError, with the reward and the row, where there is not one finite number for each answer."""

    def scores(answers: Sequence[Answer]) -> list[float]:
        found = list(score(answers))
        if len(found) != len(answers):
            raise ShoalError(f"the reward {name} gave {len(found)} scores for {len(answers)} answers: it must give one for each")
        for answer, value in zip(answers, found, strict=True):
            if not math.isfinite(value):
                raise ShoalError(f"the reward {name} gave {value} for {answer}")
        return found

    return scores
