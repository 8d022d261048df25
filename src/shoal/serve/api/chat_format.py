"""A conversation as the text that a model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError

Message = Mapping[str, str]
_LABELS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


class ChatTemplate:
    """The model's own template, or a plain labelled one where it has none."""

    def __init__(self, source: str | None, specials: Mapping[str, str]) -> None:
        self._specials = dict(specials)
        self._template = None if source is None else _compiled(source)

    @property
    def stop_words(self) -> tuple[str, ...]:
        """What ends the assistant's turn where no token does: with plain labels, the next label."""
        return () if self._template is not None else ("\nUser:", "\nSystem:")

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text up to where the assistant begins. Raises ShoalError where the template refuses the conversation."""
        if self._template is None:
            turns = [f"{_LABELS[message['role']]}: {message['content']}" for message in messages]
            return "\n".join([*turns, "Assistant:"])
        try:
            text: str = self._template.render(messages=[dict(one) for one in messages], add_generation_prompt=True, **self._specials)
        except Exception as error:  # a template is a program of the model's maker
            raise ShoalError(f"the model's chat template refuses these messages: {error}") from None
        return text


def _compiled(source: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ShoalError(f"the model's chat template cannot be read: {error}") from None


def template_in(folders: Sequence[Path]) -> ChatTemplate:
    """The template of the first of these folders that has one."""
    for folder in folders:
        config = read_object(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = next((one["template"] for one in source if one.get("name") == "default"), None)
        if isinstance(source, str):
            return ChatTemplate(source, _specials(config))
    return ChatTemplate(None, {})


def read_object(file: Path) -> dict[str, Any]:
    """What a JSON file has by name; nothing where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
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
