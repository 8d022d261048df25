"""Rows with fields (JSON lines, data sets) to documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from shoal.data.text.conversations import reader_of
from shoal.data.text.documents import Conversation, Document, Position, origin_of
from shoal.errors import ShoalError

FIELDS = ("text", "content", "body", "document", "article", "passage", "context", "story", "sentence", "code")
PAIR = ("prompt", "completion")
CONTEXT = "context"


class Fields(NamedTuple):
    """The fields of a row to read; None: detected."""

    text: str | None = None
    context: str | None = None
    reads_context: bool = False
    """Whether the model has cross-attention to a context."""


def text_field(row: Mapping[str, Any], where: str, wanted: str | None = None) -> str | None:
    """The field that holds the text; None for rows of a prompt and a completion. Raises ShoalError if this is not clear."""
    if wanted is not None:
        if wanted not in row:
            raise ShoalError(f"{where}: there is no field `{wanted}`: the fields are {_names(row)}")
        return wanted
    if all(isinstance(row.get(name, 0), str | None) for name in PAIR):
        return None
    for name in FIELDS:
        if isinstance(row.get(name, 0), str | None):  # null: the text of this row is missing
            return name
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if len(texts) == 1:
        return texts[0]
    chat = next((f"; a conversation belongs in `messages`, not in `{name}`" for name, value in row.items() if _is_chat(value)), "")
    raise ShoalError(f"{where}: which field is the text? Name one in data.source.text_field: the fields are {_names(row)}{chat}")


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and "role" in one for one in value)


def rows_to_documents(rows: Iterable[tuple[Mapping[str, Any], str, Position]], wanted: Fields) -> Iterator[tuple[Document, Position]]:
    """The documents of rows, each with the position after it. The first row determines the fields; rows without text are skipped."""
    fields: tuple[str | None, str | None] | None = None
    chat: Callable[[Mapping[str, Any], str], Conversation] | None = None
    for row, where, after in rows:
        if fields is None and chat is None and wanted.text is None:
            chat = reader_of(row)
        if chat is not None:
            yield chat(row, where).document()._replace(context=_context(row, wanted, where)), after
            continue
        fields = fields or fields_of(row, where, wanted)
        field, context = fields
        context_text = _text(row, context, where) if context else ""
        text = _text(row, PAIR[1] if field is None else field, where)
        prompt = _text(row, PAIR[0], where) if field is None else ""
        if text:
            yield Document(text, prompt, origin=origin_of(prompt + text), context=context_text), after


def fields_of(row: Mapping[str, Any], where: str, wanted: Fields) -> tuple[str | None, str | None]:
    """The fields that hold the text and its context."""
    context = wanted.context
    if context is None and wanted.reads_context and wanted.text != CONTEXT and isinstance(row.get(CONTEXT, 0), str | None):
        context = CONTEXT
    rest = {name: value for name, value in row.items() if name != context}
    if wanted.context is None and not any(isinstance(value, str) for value in rest.values()):
        return text_field(row, where, wanted.text), None  # a context alone is the text
    return text_field(rest, where, wanted.text), context


def _context(row: Mapping[str, Any], wanted: Fields, where: str) -> str:
    """The context of a row that is a conversation."""
    if wanted.context is None and not (wanted.reads_context and CONTEXT in row):
        return ""
    return _text(row, wanted.context or CONTEXT, where)


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise ShoalError(f"{where}: there is no field `{field}`: the fields are {_names(row)}")
    value = row[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ShoalError(f"{where}: `{field}` is not a text but {type(value).__name__}")
    return value


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in row) or "none"
