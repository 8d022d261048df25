"""Rows that are conversations: which columns hold them, and their messages in one form.

| columns | |
|---|---|
| `messages`, or `conversations` with `role` and `content` | messages as they are; `tools` beside them |
| `prompt` and `completion`, each a list of messages | the prompt's messages are given, the completion's are learned |
| `conversations` with `from` and `value` | ShareGPT |
| `instruction`, perhaps `input`, and `output` | Alpaca |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.config.rules.chat_rows import PAIR, form_of, is_list_of_objects, list_column
from shoal.data.text.chat_template import ROLES
from shoal.data.text.documents import Conversation
from shoal.errors import ShoalError

Row = Mapping[str, Any]
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The roles of ShareGPT's `from`."""
_MOST_MESSAGES = 10_000


def reader_of(row: Row) -> Callable[[Row, str], Conversation] | None:
    """Reads conversations from rows like this one; None: such rows are texts."""
    form, name = form_of(row), list_column(row) or ""
    if form == "messages":
        return lambda other, where: Conversation(messages_of(other.get(name), name, where), tools_of(other, where), where=where)
    return {"pair": _prompt_and_completion, "alpaca": _alpaca}[form] if form is not None else None


def dialogue(messages: Sequence[Mapping[str, Any]], *, continues: bool = False) -> str:
    """Messages in plain words, turn by turn, for a reader without a template. `continues`: up to where the assistant begins."""
    turns = [f"{message['role'].capitalize()}: {message.get('content') or ''}" for message in messages]
    return "\n".join([*turns, "Assistant: "] if continues else turns)


def messages_of(value: object, name: str, where: str) -> list[dict[str, Any]]:
    """A list of messages, each with a role that is known. Raises ShoalError."""
    if not is_list_of_objects(value):
        raise ShoalError(f"{where}: `{name}` must be a list of messages, and it is {type(value).__name__}")
    assert isinstance(value, Sequence)
    if len(value) > _MOST_MESSAGES:
        raise ShoalError(f"{where}: `{name}` has {len(value):,} messages, and at most {_MOST_MESSAGES:,} are read")
    return [_message(one, name, where) for one in value]


def _message(value: object, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ShoalError(f"{where}: each message of `{name}` must be an object, and one is {type(value).__name__}")
    if "from" in value and "role" not in value:
        role, content = _SHAREGPT.get(str(value["from"])), value.get("value")
        return _checked({"role": role or value["from"], "content": content}, name, where)
    return _checked({key: one for key, one in value.items() if one is not None}, name, where)


def _checked(message: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ShoalError(f"{where}: each message of `{name}` must have a `role` ({', '.join(ROLES)}), and one has {role!r:.60}")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = joined_parts(content, name, where)
    if not isinstance(content, str | None) or (content is None and not calls):
        raise ShoalError(f"{where}: each message of `{name}` must have a `content` that is a text, and one has {type(content).__name__}")
    if calls is not None:
        message = message | {"tool_calls": [_call(one, name, where) for one in calls] if isinstance(calls, Sequence) else calls}
    return message | {"content": content}


def joined_parts(parts: Sequence[Any], name: str, where: str) -> str:
    """The text of a content that is a list of parts. Raises ShoalError where a part is no text."""
    if not all(isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise ShoalError(f"{where}: a message of `{name}` has a part that is no text, and only texts are read")
    return "".join(part["text"] for part in parts)


def _call(call: object, name: str, where: str) -> dict[str, Any]:
    """A tool call whose arguments are an object: OpenAI's API writes them as a text, and templates write an object as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ShoalError(f"{where}: each of `tool_calls` in a message of `{name}` must have a function with a `name`")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ShoalError(f"{where}: the `arguments` of a tool call in `{name}` are not JSON") from None
    plain = {**function, "arguments": arguments}
    return {**call, "function": plain} if "function" in call else plain


def tools_of(row: Row, where: str) -> list[Any] | None:
    """The tools of a row, which some data sets write as a text."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ShoalError(f"{where}: `tools` is not JSON: {error}") from None
    if tools and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ShoalError(f"{where}: `tools` must be a list of objects, and it is {type(tools).__name__}")
    return list(tools) if tools else None


def _prompt_and_completion(row: Row, where: str) -> Conversation:
    prompt, completion = (messages_of(row.get(name), name, where) for name in PAIR)
    return Conversation([*prompt, *completion], tools_of(row, where), len(prompt), where)


def _alpaca(row: Row, where: str) -> Conversation:
    texts = {name: row.get(name) or "" for name in ("system", "instruction", "input", "output")}
    wrong = next((name for name, text in texts.items() if not isinstance(text, str)), None)
    if wrong is not None:
        raise ShoalError(f"{where}: `{wrong}` must be a text, and it is {type(row[wrong]).__name__}")
    asked = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return Conversation(
        [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": texts["output"]}], None, len(system) + 1, where
    )
