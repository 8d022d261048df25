"""A conversation as the text that a model reads: rendered with the model's own chat template, or with one that is named.

Holds: a template is rendered in transformers' environment, by a process of its own with limits of time, memory and length
(`untrusted/prompt_process.py`); training, feedback, evaluation and serving render here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.config.schema.data import CHAT_TEMPLATES
from shoal.data.text.tokenizers import Tokenizer
from shoal.data.text.tokenizers.files import MOST_TEMPLATE_BYTES, template_text
from shoal.errors import ShoalError
from shoal.files import read_file
from shoal.untrusted.prompt_process import PromptProcess

Message = Mapping[str, Any]
"""A `role`, and a `content`, `tool_calls`, or both."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_FOLDER = Path(__file__).with_name("chat_templates")
_MEMORY_BYTES = 1 << 30
"""Memory for rendering, the program included."""
_AT_ONCE = 32
"""Conversations of one request. Their time is limited together."""
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "c"})


class Cut(NamedTuple):
    """A place in a conversation's text: after some messages, before or after the generation prompt that may follow them."""

    messages: int
    generation_prompt: bool


class RenderRequest(NamedTuple):
    """A conversation to render."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    generation_prompt: bool = False
    cuts: Sequence[Cut] = ()
    where: str = ""
    """Its place in a file, for messages."""


class RenderedChat(NamedTuple):
    """The text of a conversation."""

    text: str
    marks: tuple[tuple[int, int], ...]
    """The ranges of letters that the template's generation marks enclose."""
    cuts: tuple[int | None, ...]
    """The length of the text up to each cut; None: the text does not begin with the text of those messages alone."""


class ChatTemplate:
    """The templates of a model: `default`, and perhaps `tool_use` for conversations with tools. `specials`: its special tokens by name;
    `now`: the time that templates read, None: the clock's."""

    def __init__(self, templates: Mapping[str, str], specials: Mapping[str, str], now: str | None = None) -> None:
        self._process = PromptProcess(
            "the model's chat template", _MEMORY_BYTES, templates=dict(templates), variables=dict(specials), now=now
        )
        self._end: str | None = None

    def render(self, requests: Sequence[RenderRequest]) -> list[RenderedChat]:
        """Raises ShoalError where the template refuses a conversation."""
        found: list[RenderedChat] = []
        for start in range(0, len(requests), _AT_ONCE):
            some = requests[start : start + _AT_ONCE]
            found += map(_rendered, some, self._process.ask([_plain(request) for request in some]))
        return found

    def check(self) -> None:
        """Raises ShoalError where a template is none."""
        self._process.start()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The text up to where the assistant begins."""
        return self.render([RenderRequest(messages, tools, generation_prompt=True)])[0].text

    @property
    def end_of_turn(self) -> str:
        """What the template writes after the assistant's words, such as `<|im_end|>`; empty: nothing, or only white space."""
        if self._end is None:
            try:
                text = self.render([RenderRequest(_PROBE)])[0].text
            except ShoalError:  # a template that expects something else of a conversation
                text = "c"
            self._end = text[text.rindex("c") + 1 :].strip() if "c" in text else ""
        return self._end


def _plain(request: RenderRequest) -> dict[str, Any]:
    fields = request._asdict()
    return fields | {"messages": [dict(one) for one in request.messages], "cuts": [list(cut) for cut in request.cuts]}


def _rendered(request: RenderRequest, reply: Mapping[str, Any]) -> RenderedChat:
    if "error" in reply:
        raise ShoalError(f"{request.where or 'this conversation'}: the model's chat template refuses it: {reply['error']}")
    return RenderedChat(reply["text"], tuple((start, end) for start, end in reply["marks"]), tuple(reply["cuts"]))


def read_template(name: str) -> str:
    """The template that a setting names: one of Shoal's, or a file. Raises ShoalError."""
    file = _FOLDER / f"{name}.jinja" if name in CHAT_TEMPLATES else Path(name).expanduser()
    content = read_file(file, MOST_TEMPLATE_BYTES)
    if content is None:
        raise ShoalError(f"data.chat_template: there is no file {name}: name one, or {', '.join(f'`{one}`' for one in CHAT_TEMPLATES)}")
    return template_text(content, file)


def template_of(tokenizer: Tokenizer, now: str | None = None) -> ChatTemplate | None:
    """The templates that a tokenizer came with; None: it has none. Raises ShoalError."""
    templates = tokenizer.chat_templates
    return ChatTemplate(templates, tokenizer.special_tokens, now) if "default" in templates else None


def plain_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Turns with labels, for a model that has no template."""
    return ChatTemplate({"default": read_template("plain")}, tokenizer.special_tokens)
