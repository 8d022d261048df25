"""Documents: the common form of all sources of text, which can be read from any position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, Literal, NamedTuple, Protocol

from shoal.data.splits import held_out_numbers

Position = Any
"""A position in documents; JSON-able."""

Unit = Literal["whole", "piece", "line"]
"""The documents of a plain text file: the whole file, pieces of some kilobytes (streams), or lines (each line is a text)."""

FEW = 20


class Conversation(NamedTuple):
    """Messages, each with a `role` and a `content`."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    prompt_messages: int | None = None
    """How many of the messages are a prompt, of which nothing is learned; None: the rows do not separate it."""
    where: str = ""
    """Its place in a file, for messages."""

    def document(self) -> Document:
        contents = [str(message.get("content") or "") for message in self.messages]
        identity = origin_of(json.dumps([self.messages, self.tools], sort_keys=True, default=str))
        return Document("\n".join(contents), origin=identity, conversation=self)

    @property
    def assistant_turns(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)


class Document(NamedTuple):
    """A text. The model learns to write it, after the prompt if there is one."""

    text: str
    prompt: str = ""
    complete: bool = True
    """False: the next document continues this one."""
    origin: str = ""
    """Identifies the document on every machine: a digest of its content. A `#` separates the digest of a file and a line number."""
    context: str = ""
    """A text for cross-attention."""
    continues: bool = False
    """Whether it continues the document before it."""
    conversation: Conversation | None = None
    """The messages of a conversation, whose contents `text` joins."""


def origin_of(text: str | bytes) -> str:
    """The origin of a document with this content."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text).hexdigest()[:16]


class Documents(Protocol):
    """A sequence of documents that can be read from any position."""

    def read(self, position: Position = None) -> Iterator[tuple[Document, Position]]:
        """Each document with the position after it; from the beginning, or from a position that an earlier call returned."""
        ...

    def size(self) -> int | None:
        """The amount of text, as a weight in mixtures; None: unknown."""
        ...


class TextPart(NamedTuple):
    """Documents of one source, and its own held-out documents, if it has any."""

    name: str
    train: Documents
    held_out: Documents | None
    weight: float | None = None


class InMemoryDocuments:
    """Documents that are in memory."""

    def __init__(self, texts: Sequence[str | Document]) -> None:
        documents = (Document(text) if isinstance(text, str) else text for text in texts)
        self._documents = [one._replace(origin=one.origin or origin_of(one.text)) for one in documents]

    def read(self, position: Position = None) -> Iterator[tuple[Document, Position]]:
        for number in range(position or 0, len(self._documents)):
            yield self._documents[number], number + 1

    def size(self) -> int:
        return sum(len(document.text) + len(document.prompt) for document in self._documents)


class ChainedDocuments:
    """Documents of several sources, one source after the other."""

    def __init__(self, parts: Sequence[Documents]) -> None:
        self._parts = parts

    def read(self, position: Position = None) -> Iterator[tuple[Document, Position]]:
        first, inner = position or (0, None)
        for number in range(first, len(self._parts)):
            for document, after in self._parts[number].read(inner):
                yield document, [number, after]
            inner = None

    def size(self) -> int | None:
        sizes = [part.size() for part in self._parts]
        return None if any(size is None for size in sizes) else sum(size or 0 for size in sizes)


class DocumentFronts:
    """Documents without their ends, which are held out."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def read(self, position: Position = None) -> Iterator[tuple[Document, Position]]:
        for document, after in self._documents.read(position):
            yield cut(document)[0], after

    def size(self) -> int | None:
        return self._documents.size()


def split(documents: Sequence[Document], seed: int) -> tuple[list[Document], list[Document]]:
    """Hold out 5 %: documents chosen by seed; or of fewer than 20 documents the end of each."""
    if len(documents) >= FEW:
        held = held_out_numbers(len(documents), seed)
        return list(compress(documents, ~held)), list(compress(documents, held))
    halves = [cut(document) for document in documents]
    return [front for front, _ in halves if front.text], [back for _, back in halves if back.text]


def cut(document: Document) -> tuple[Document, Document]:
    """The front of a document, and its last twentieth, cut at a line break if there is one near."""
    if document.prompt or document.conversation is not None:  # an answer stays with its prompt
        return document, document._replace(text="")
    text = document.text
    at = text.rfind("\n", 0, len(text) - len(text) // 20) + 1 or len(text) - len(text) // 20
    if at < len(text) * 9 // 10:  # the lines are longer than the held-out part
        at = len(text) - len(text) // 20
    return document._replace(text=text[:at]), document._replace(text=text[at:])
