"""Source positions of settings: the text they were read from, and a span of one of its lines."""

from __future__ import annotations

from typing import Literal, NamedTuple

SourceKind = Literal["file", "environment", "command line", "default", "python"]


class SourceText:
    """A file, command-line argument or environment variable, with its text."""

    __slots__ = ("kind", "layer", "lines", "name", "order")

    def __init__(self, name: str, text: str = "", *, kind: SourceKind = "file", layer: str = "", order: int = 0) -> None:
        self.name = name
        self.lines = text.split("\n")
        self.kind = kind
        self.layer = layer
        self.order = order

    def line(self, number: int) -> str | None:
        return self.lines[number - 1].rstrip("\r") if 0 < number <= len(self.lines) else None

    def whole(self) -> Span:
        return Span(self, 0, 1, 1)


class Span(NamedTuple):
    """A part of one line of a source; lines and columns count from 1. Line 0 is the whole source."""

    source: SourceText
    line: int
    column: int
    length: int

    def __str__(self) -> str:
        if not self.line:
            return self.source.name
        if self.source.kind != "file":
            return self.source.name if self.source.lines == [self.source.name] else f"{self.source.name}: {self.source.lines[0]}"
        return f"{self.source.name}:{self.line}:{self.column}"
