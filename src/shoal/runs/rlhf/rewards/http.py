"""Reward from a judge over HTTP: a server with OpenAI's API is asked whether an answer is good."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

from shoal.config.schema.rlhf import JudgeReward
from shoal.errors import ShoalError
from shoal.runs.rlhf.rewards.interface import Answer, Score, filled

_AT_ONCE = 8
_TIMEOUT_S = 120.0
_TRIES, _PAUSE_S = 3, 1.0
_LONGEST_ANSWER = 1 << 20
_UNDECIDED = 0.5
_WORDS = {"yes": 1, "y": 1, "no": 0, "n": 0}
"""A word may be more than one token, so its first letter is enough."""


def ask(settings: JudgeReward) -> Score:
    """The score of an answer is the probability of `yes` relative to `no` among the first tokens that the server lists. If it lists no
    probabilities, its reply counts: 1 for yes, 0 for no, 0.5 for anything else."""
    threads = ThreadPoolExecutor(_AT_ONCE, "judge")

    def score(answers: Sequence[Answer]) -> list[float]:
        return list(threads.map(lambda answer: verdict(_reply_of(settings, filled(settings.question, answer))), answers))

    return score


def verdict(said: dict[str, Any]) -> float:
    """The probability of `yes` in a server's response. Raises ShoalError if the response is not in the form of OpenAI's API."""
    try:
        choice = said["choices"][0]
        tokens = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") or []
        chances = [0.0, 0.0]
        for one in tokens:
            if (word := _plain(one["token"])) in _WORDS:
                chances[_WORDS[word]] += math.exp(min(0.0, float(one["logprob"])))
        if sum(chances) > 0:
            return chances[1] / sum(chances)
        return float(_WORDS.get(_plain(choice["message"]["content"].split()[0]), _UNDECIDED))
    except IndexError:
        return _UNDECIDED  # the reply is empty
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ShoalError("rlhf.reward.address: what answers there does not speak as OpenAI's chat completions do") from None


def _plain(word: str) -> str:
    return "".join(letter for letter in word.casefold() if letter.isalpha())


def _reply_of(settings: JudgeReward, question: str) -> dict[str, Any]:
    assert settings.address is not None
    asked = {
        "model": settings.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 20,
    }
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {settings.key.reveal()}"} if settings.key else {})
    request = urllib.request.Request(f"{settings.address.rstrip('/')}/chat/completions", json.dumps(asked).encode(), headers)
    for attempt in range(_TRIES):
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                found = json.loads(response.read(_LONGEST_ANSWER))
                return found if isinstance(found, dict) else {}
        except urllib.error.HTTPError as error:
            if error.code not in (408, 429, 500, 502, 503, 504) or attempt == _TRIES - 1:
                said = _error_text(error)
                raise ShoalError(f"rlhf.reward.address: the judge at {settings.address} refused ({error.code}): {said}") from None
        except (OSError, ValueError, HTTPException) as error:
            if attempt == _TRIES - 1:
                raise ShoalError(f"rlhf.reward.address: no answer from {settings.address}: {error}") from None
        time.sleep(_PAUSE_S * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _error_text(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(300).decode(errors="replace")
    except (OSError, HTTPException):
        return str(error.reason)
