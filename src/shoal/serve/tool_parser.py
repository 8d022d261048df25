"""Finds calls of tools in an answer while it is written."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from shoal.data import StreamedText
from shoal.serve.tool_formats import ToolFormat

_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')
_LONGEST_NAME = 100
_STRING_LETTER = re.compile(r'[^"\\]+')
_LETTERS = string.ascii_letters + string.digits


class CallPiece(NamedTuple):
    """A part of a call, in the order in which it is written: first id and name, then the arguments."""

    number: int
    arguments: str = ""
    id: str | None = None
    """Only in the first piece of a call."""
    name: str | None = None


class MarkedText:
    """Decodes tokens as StreamedText does, and writes special tokens that begin or end calls."""

    def __init__(self, text: StreamedText, marks: ToolFormat) -> None:
        self._text, self._marks = text, marks.special

    def add(self, *tokens: int) -> str:
        found, plain = "", list[int]()
        for token in tokens:
            if token in self._marks:
                found += (self._text.add(*plain) if plain else "") + self._text.finish() + self._marks[token]
                plain = []
            else:
                plain.append(token)
        return found + (self._text.add(*plain) if plain else "")

    def finish(self) -> str:
        return self._text.finish()


class ToolCallParser:
    """Splits the text of one answer into words for the user and calls. What begins like a call and is none stays text."""

    def __init__(self, form: ToolFormat, names: Collection[str], most_calls: int | None) -> None:
        """`names`: the tools; `most_calls`: after this many the answer ends; None: any number."""
        self._form, self._names, self._most = form, names, most_calls
        self._rest = ""
        """Text that is not understood yet."""
        self._begun = ""
        """What was read of a call that may be none."""
        self._state: Callable[[], bool] = self._text if form.is_marked else self._beginning
        self._json = _JsonEnd()
        self.calls = 0
        """Calls whose name was read."""
        self._complete = 0
        self._words: list[str] = []
        self._pieces: list[CallPiece] = []

    @property
    def is_done(self) -> bool:
        """Whether the answer has as many calls as it may have."""
        return self._most is not None and self._complete >= self._most

    def add(self, text: str) -> tuple[str, Sequence[CallPiece]]:
        """The words and the parts of calls that are certain now."""
        self._rest += text
        while self._rest and not self.is_done and self._state():
            pass
        return self._taken()

    def finish(self) -> tuple[str, Sequence[CallPiece]]:
        """What was held back."""
        if not self.is_done and self._state in (self._head, self._beginning, self._text):
            held = self._begun + self._rest
            self._words.append(held if held.strip() or not self.calls else "")
        return self._taken()

    def _taken(self) -> tuple[str, Sequence[CallPiece]]:
        words, pieces = "".join(self._words), self._pieces
        (
            self._words,
            self._pieces,
        ) = [], []
        return words, pieces

    # --- states: each takes from the rest, and returns whether more can be understood -------------------

    def _text(self) -> bool:
        """Words, up to the mark. White space is held back: before a call it is dropped."""
        before, mark, after = self._rest.partition(self._form.mark)
        if mark:
            self._words.append(before.rstrip())
            self._rest, self._begun, self._state = after, before[len(before.rstrip()) :] + mark, self._head
            return True
        sure = self._rest[: len(self._rest) - _beginning_of(self._form.mark, self._rest)].rstrip()
        self._words.append(sure)
        self._rest = self._rest[len(sure) :]
        return False

    def _beginning(self) -> bool:
        """The beginning of an answer that is a call if it begins with a brace, perhaps after a mark."""
        text = self._rest.lstrip()
        if not text or (self._form.mark.startswith(text) and text != self._form.mark):
            return False
        if text.startswith((self._form.mark, "{")):
            called = text.removeprefix(self._form.mark)
            self._begun, self._rest, self._state = self._rest[: len(self._rest) - len(called)], called, self._head
        else:
            self._state = self._plain
        return True

    def _plain(self) -> bool:
        """Words to the end: nothing that follows is read as a call."""
        self._words.append(self._rest)
        self._rest = ""
        return False

    def _head(self) -> bool:
        """The beginning of a call, up to its arguments."""
        found = self._read_head()
        if found is None:
            return False
        name, end = found
        if name not in self._names:
            self._rest, self._begun, self._state = self._begun + self._rest, "", self._plain
            return True
        id = "".join(secrets.choice(_LETTERS) for _ in range(self._form.id_letters))
        self._pieces.append(CallPiece(self.calls, "", id if self._form.id_letters == 9 else f"call_{id}", name))
        self.calls += 1
        self._rest, self._begun, self._json, self._state = self._rest[end:], "", _JsonEnd(), self._arguments
        return True

    def _read_head(self) -> tuple[str, int] | None:
        """The name of the tool and where its arguments begin; an empty name: this is no call. None: more is needed."""
        at, name = 0, ""
        opening = ("[", "{") if self._form.is_list and not self._complete else ("{",)
        for part in (*opening, '"name"', ":", "", ",", f'"{self._form.key}"', ":", "{"):
            while at < len(self._rest) and self._rest[at].isspace():
                at += 1
            here = self._rest[at : at + _LONGEST_NAME]
            if part == "" and (found := _NAME.match(here)):
                name, at = found[1], at + found.end()
            elif part and here.startswith(part):
                at += len(part)
            else:
                is_partial = here.startswith('"') and len(here) < _LONGEST_NAME if part == "" else part.startswith(here)
                return None if not here or is_partial else ("", 0)
        return name, at - 1

    def _arguments(self) -> bool:
        """The arguments of a call, which are passed on as they come."""
        end = self._json.find(self._rest)
        taken = self._rest if end is None else self._rest[:end]
        self._pieces.append(CallPiece(self.calls - 1, taken))
        self._rest = self._rest[len(taken) :]
        if end is not None:
            self._json, self._state = _JsonEnd(1), self._tail
        return end is not None

    def _tail(self) -> bool:
        """The rest of the object that is a call: its last brace, and fields after the arguments."""
        end = self._json.find(self._rest)
        self._rest = "" if end is None else self._rest[end:]
        if end is not None:
            self._complete += 1
            self._state = self._between
        return end is not None

    def _between(self) -> bool:
        """What ends a call, and what begins the next one."""
        text = self._rest.lstrip()
        close = self._form.close or ("]" if self._form.is_list else "")
        if self._form.is_list and text.startswith(","):
            self._rest, self._state = text[1:], self._head
            return True
        if not text or (close.startswith(text) and text != close):
            return False
        self._rest = text.removeprefix(close)
        self._state = self._text
        return True


class _JsonEnd:
    """Finds the end of an object that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._is_escaped = depth, False, False

    def find(self, text: str) -> int | None:
        """Where in this piece the object has ended; None: it has not."""
        at = 0
        while at < len(text):
            letter = text[at]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                if (plain := _STRING_LETTER.match(text, at)) is not None:
                    at = plain.end()
                    continue
                self._is_escaped, self._in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
            at += 1
        return None


def _beginning_of(mark: str, text: str) -> int:
    """How many of the last letters of a text may begin the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
