"""A conversation as the text that a model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.files import read_file
from shoal.untrusted.prompt_process import PromptProcess

Message = Mapping[str, str]
_TEMPLATE_BYTES = 1 << 30
"""Memory for rendering a template, its program included."""
_MOST_TEMPLATE_BYTES = 4 << 20
_MOST_JSON_BYTES = 64 << 20
_LABELS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


class ChatTemplate:
    """The model's own template, or a plain labelled one where it has none."""

    def __init__(self, source: str | None, specials: Mapping[str, str]) -> None:
        self._specials = dict(specials)
        self._template = None if source is None else PromptProcess("the model's chat template", _TEMPLATE_BYTES, template=source)

    @property
    def stop_words(self) -> tuple[str, ...]:
        """What ends the assistant's turn where no token does: with plain labels, the next label."""
        return () if self._template is not None else ("\nUser:", "\nSystem:")

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text up to where the assistant begins. Raises ShoalError where the template refuses the conversation."""
        if self._template is None:
            turns = [f"{_LABELS[message['role']]}: {message['content']}" for message in messages]
            return "\n".join([*turns, "Assistant:"])
        variables = {"messages": [dict(one) for one in messages], "add_generation_prompt": True, **self._specials}
        text: str = self._template.ask(variables)
        return text


def template_in(folders: Sequence[Path]) -> ChatTemplate:
    """The template of the first of these folders that has one."""
    for folder in folders:
        config = read_object(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = _text(file) if file.exists() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((one.get("template") for one in source if isinstance(one, dict) and one.get("name") == "default"), None)
        if isinstance(source, str):
            return ChatTemplate(source, _specials(config))
    return ChatTemplate(None, {})


def _text(file: Path) -> str:
    try:
        return (read_file(file, _MOST_TEMPLATE_BYTES) or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ShoalError(f"{file} is not UTF-8: {error}") from None


def read_object(file: Path) -> dict[str, Any]:
    """What a JSON file has by name; nothing where there is none."""
    try:
        found = json.loads(read_file(file, _MOST_JSON_BYTES) or b"{}")
    except (ShoalError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _specials(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found
