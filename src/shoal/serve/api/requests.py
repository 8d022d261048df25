"""What a client may ask for, checked field by field. Every fault names its parameter, in OpenAI's form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shoal.web.auth import RefusedError

MOST_CHOICES = 8
MOST_STOPS = 4
MOST_BIASES = 300
_LARGEST_SEED = 2**63
_IGNORABLE = frozenset({"user", "metadata", "safety_identifier"})
"""Words about the request that change nothing in an answer, here or at OpenAI's."""
_ROLES = ("system", "developer", "user", "assistant")
STRATEGIES = ("greedy", "sampling", "top_k", "top_p", "top_k_top_p")


class Asked(NamedTuple):
    """A request whose every field is good. Null: the server's own setting."""

    model: str
    messages: list[dict[str, str]] | None
    prompts: list[str | list[int]] | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    strategy: str | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    n: int
    stop: list[str]
    seed: int | None
    top_logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool


def read_json(raw: bytes) -> dict[str, Any]:
    """The body of a request. Raises RefusedError."""

    def no_constant(word: str) -> None:
        raise ValueError(f"{word} is no number of JSON")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError(400, "the body must be a JSON object")
    return {str(name): value for name, value in body.items() if value is not None}


def read_chat(body: dict[str, Any]) -> Asked:
    """`POST /v1/chat/completions`. Raises RefusedError."""
    fields = _Fields(body)
    wants, count = fields.flag("logprobs"), fields.whole("top_logprobs", 0, 20)
    if count is not None and not wants:
        raise RefusedError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    both = fields.whole("max_tokens", 1, 10**9), fields.whole("max_completion_tokens", 1, 10**9)
    if fields.values.get("response_format") == {"type": "text"}:
        fields.values.pop("response_format")
    return _asked(
        fields,
        messages=_messages(fields.take("messages")),
        prompts=None,
        max_tokens=both[0] if both[1] is None else both[1],
        top_logprobs=(count or 0) if wants else None,
        echo=False,
    )


def read_completion(body: dict[str, Any]) -> Asked:
    """`POST /v1/completions`. Raises RefusedError."""
    fields = _Fields(body)
    best_of = fields.whole("best_of", 1, MOST_CHOICES)
    if best_of is not None and best_of != (body.get("n") or 1):
        raise RefusedError(400, "best_of is not offered: it must equal n", param="best_of")
    return _asked(
        fields,
        messages=None,
        prompts=_prompts(fields.take("prompt")),
        max_tokens=fields.whole("max_tokens", 1, 10**9),
        top_logprobs=fields.whole("logprobs", 0, 5),
        echo=fields.flag("echo"),
    )


def _asked(fields: _Fields, **own: Any) -> Asked:
    """The fields that both kinds of request have. What is left over is refused by name."""
    common: dict[str, Any] = {
        "model": fields.text("model"),
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", -1, 10**9),
        "min_p": fields.number("min_p", 0, 1),
        "strategy": fields.choice("strategy", STRATEGIES),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100),
        "presence_penalty": fields.number("presence_penalty", -2, 2) or 0.0,
        "frequency_penalty": fields.number("frequency_penalty", -2, 2) or 0.0,
        "logit_bias": _biases(fields.values.pop("logit_bias", {})),
        "n": fields.whole("n", 1, MOST_CHOICES) or 1,
        "stop": _stops(fields.values.pop("stop", [])),
        "seed": fields.whole("seed", -_LARGEST_SEED, _LARGEST_SEED - 1),
        "stream": fields.flag("stream"),
    }
    options = fields.values.pop("stream_options", {})
    if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise RefusedError(400, "stream_options takes include_usage", param="stream_options")
    fields.refuse_others()
    return Asked(**common, include_usage=options.get("include_usage") is True, **own)


class _Fields:
    """The fields of a body that nobody has taken yet."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.values = {name: value for name, value in body.items() if name not in _IGNORABLE}

    def take(self, name: str) -> Any:
        if name not in self.values:
            raise RefusedError(400, f"you must provide {name}", param=name)
        return self.values.pop(name)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise RefusedError(400, f"{name} must be text", param=name)
        return value

    def flag(self, name: str) -> bool:
        value = self.values.pop(name, False)
        if not isinstance(value, bool):
            raise RefusedError(400, f"{name} must be true or false", param=name)
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str | None:
        value: str | None = self.values.pop(name, None)
        if value is not None and value not in choices:
            raise RefusedError(400, f"{name} must be one of {', '.join(choices)}", param=name)
        return value

    def whole(self, name: str, least: int, most: int) -> int | None:
        value: int | None = self.values.pop(name, None)
        good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if value is not None and not good:
            raise RefusedError(400, f"{name} must be a whole number from {least} to {most}", param=name)
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self.values.pop(name, None)
        if value is None:
            return None
        return _number(value, name, least, most)

    def refuse_others(self) -> None:
        for name in self.values:
            raise RefusedError(400, f"{name} is not offered by this server", param=name, code="unsupported_parameter")


def _number(value: Any, name: str, least: float, most: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and least <= value <= most
    if not good:
        raise RefusedError(400, f"{name} must be a number from {least} to {most}", param=name)
    return float(value)


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise RefusedError(400, "messages must be a list of at least one message", param="messages")
    return [_message(one, f"messages[{i}]") for i, one in enumerate(value)]


def _message(value: Any, place: str) -> dict[str, str]:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        raise RefusedError(400, f"{place} must have a role: one of {', '.join(_ROLES)}", param=place)
    strange = {name for name, one in value.items() if one is not None} - {"role", "content", "name"}
    if strange:
        raise RefusedError(400, f"{place}: {sorted(map(str, strange))[0]} is not offered by this server", param=place)
    return {"role": value["role"], "content": _content(value.get("content"), f"{place}.content")}


def _content(value: Any, place: str) -> str:
    """Text, or a list of parts that are text."""
    if isinstance(value, list) and value:
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in value):
            raise RefusedError(400, f"{place}: this server reads parts of type text only", param=place)
        return "".join(_encodable(part.get("text"), place) for part in value)
    return _encodable(value, place)


def _encodable(value: Any, place: str) -> str:
    """Text that has an encoding: JSON can write halves of characters, too."""
    if not isinstance(value, str):
        raise RefusedError(400, f"{place} must be text", param=place)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusedError(400, f"{place} has half of a character (a lone surrogate)", param=place) from None
    return value


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several; each is text, or ids."""
    several = value if isinstance(value, list) and value and not _is_ids(value) else [value]
    if len(several) > MOST_CHOICES:
        raise RefusedError(400, f"prompt may have {MOST_CHOICES} prompts at most", param="prompt")
    return [one if _is_ids(one) else _encodable(one, "prompt") for one in several]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _stops(value: Any) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or len(words) > MOST_STOPS or not all(isinstance(word, str) and 0 < len(word) <= 256 for word in words):
        raise RefusedError(400, f"stop must be a text of up to 256 letters, or a list of up to {MOST_STOPS}", param="stop")
    return words


def _biases(value: Any) -> dict[int, float]:
    check: Callable[[Any], bool] = lambda key: isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10  # noqa: E731
    if not isinstance(value, Mapping) or len(value) > MOST_BIASES or not all(map(check, value)):
        raise RefusedError(400, f"logit_bias must map up to {MOST_BIASES} token ids to numbers", param="logit_bias")
    return {int(token): _number(bias, "logit_bias", -100, 100) for token, bias in value.items()}
