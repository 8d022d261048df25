"""Which letters of a text the model learns to write: all, those of an answer after its prompt, or the assistant's turns.

With generation marks in the template these decide. Without them a turn begins where the generation prompt ends, and ends with the mark that
the template writes after it. A template that renders earlier turns otherwise once others follow gives a text for each turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from shoal.data.text.chat_template import ChatTemplate, Cut, RenderedChat, RenderRequest
from shoal.data.text.documents import Conversation, Document
from shoal.errors import ShoalError

LearnFrom = Literal["assistant", "completion", "all"]
Span = tuple[int, int]


class LearnedText(NamedTuple):
    """A text, and the ranges of its letters that the model learns to write."""

    text: str
    spans: tuple[Span, ...]
    is_chat: bool = False
    """Whether a template wrote it, with all that comes before and after."""


def learned_texts(documents: Sequence[Document], template: ChatTemplate | None, learn_from: LearnFrom) -> list[list[LearnedText]]:
    """The texts of each document: one; of a conversation perhaps one for each turn of the assistant. Raises ShoalError."""
    chats = [document.conversation for document in documents if document.conversation is not None]
    rendered = iter(_chats(chats, template, learn_from) if chats else [])
    return [[_text(document, learn_from)] if document.conversation is None else next(rendered) for document in documents]


def _text(document: Document, learn_from: LearnFrom) -> LearnedText:
    text = document.prompt + document.text
    return LearnedText(text, ((0 if learn_from == "all" else len(document.prompt), len(text)),))


def _chats(chats: Sequence[Conversation], template: ChatTemplate | None, learn_from: LearnFrom) -> list[list[LearnedText]]:
    if template is None:
        raise ShoalError(
            f"{chats[0].where}: this row is a conversation, and the model has no chat template: name one in data.chat_template"
        )
    turns = [_turns(chat, learn_from) for chat in chats]
    requests = [RenderRequest(chat.messages, chat.tools, cuts=_cuts(one), where=chat.where) for chat, one in zip(chats, turns, strict=True)]
    rendered = template.render(requests)
    found = [_learned(chat, one, text, learn_from) for chat, one, text in zip(chats, turns, rendered, strict=True)]
    again = [(chat, turn) for chat, one, spans in zip(chats, turns, found, strict=True) if spans is None for turn in one]
    texts = iter(_one_by_one(again, template))
    return [
        [LearnedText(text.text, spans, True)] if spans is not None else list(islice(texts, len(one)))
        for one, spans, text in zip(turns, found, rendered, strict=True)
    ]


def _turns(chat: Conversation, learn_from: LearnFrom) -> list[tuple[int, int]]:
    """The ranges of messages that are learned: each turn of the assistant by itself, or all after the prompt at once."""
    if learn_from == "all":
        return []
    count, given = len(chat.messages), chat.prompt_messages
    answers = [number for number in range(given or 0, count) if chat.messages[number]["role"] == "assistant"]
    if learn_from == "assistant":
        return [(number, number + 1) for number in answers]
    if given is not None:
        return [(given, count)]
    if not answers:
        return []
    first = answers[-1]
    while first - 1 in answers:
        first -= 1
    return [(first, answers[-1] + 1)]


def _cuts(turns: Sequence[tuple[int, int]]) -> list[Cut]:
    return [cut for first, after in turns for cut in (Cut(first, True), Cut(after, False))]


def _learned(
    chat: Conversation, turns: Sequence[tuple[int, int]], rendered: RenderedChat, learn_from: LearnFrom
) -> tuple[Span, ...] | None:
    """The ranges of letters that are learned; None: the text does not hold every turn as it was when it was written."""
    if learn_from == "all":
        return ((0, len(rendered.text)),)
    if rendered.marks and learn_from == "assistant" and chat.prompt_messages is None:
        return rendered.marks
    cuts = rendered.cuts
    if any(cut is None for cut in cuts):
        return None
    spans = tuple(
        (start, _end_of_turn(rendered.text, start, end, str(chat.messages[after - 1].get("content") or "")))
        for start, end, (_, after) in zip(cuts[::2], cuts[1::2], turns, strict=True)
        if start is not None and end is not None
    )
    if rendered.marks and learn_from == "assistant":  # of the prompt's turns none is learned
        first = min((start for start, _ in spans), default=len(rendered.text))
        return tuple(mark for mark in rendered.marks if mark[0] >= first)
    return spans


def _one_by_one(turns: Sequence[tuple[Conversation, tuple[int, int]]], template: ChatTemplate) -> Iterator[LearnedText]:
    """The text up to the end of each turn, of which that turn is learned."""
    requests = [
        RenderRequest(chat.messages[:after], chat.tools, cuts=[Cut(first, True)], where=chat.where) for chat, (first, after) in turns
    ]
    for (chat, (_, after)), rendered in zip(turns, template.render(requests) if requests else (), strict=True):
        start = rendered.cuts[0]
        if start is None:
            raise ShoalError(
                f"{chat.where}: with this chat template the assistant's turn does not begin as the generation prompt does, so it is not "
                "clear what the model is to learn: put {% generation %} marks into a copy of the template, and name it in "
                "data.chat_template; or set data.learn_from to all"
            )
        content = str(chat.messages[after - 1].get("content") or "")
        yield LearnedText(rendered.text, ((start, _end_of_turn(rendered.text, start, len(rendered.text), content)),), True)


def _end_of_turn(text: str, start: int, end: int, content: str) -> int:
    """The end of a turn without the white space after its mark, which no model writes. A turn without a mark ends with its white space."""
    written = text[start:end].rstrip()
    return end if content.strip() and written.endswith(content.strip()) else start + len(written)
