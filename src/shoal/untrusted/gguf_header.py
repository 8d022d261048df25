"""The header of a GGUF file, checked before a library reads the file.

Holds: every count and every length lies within the file, the tensors together need no more bytes than the file has, and the model has no
more layers, experts or positions than any model has.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from shoal.errors import ShoalError
from shoal.untrusted.huggingface import check_config

_MOST_ENTRIES = 100_000
_MOST_ARRAY_ITEMS = 8_000_000
_LONGEST_KEY = 65_535
_MOST_DIMENSIONS = 4
_LEAST_BYTES = 50 / 256
"""Bytes of a number in the most compact of the formats."""
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_VOCABULARY, _RULE, _ARCHITECTURE = _NAMES = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "general.architecture")
"""The kind of the vocabulary, the rule by which it cuts texts into words, and the kind of the model."""
_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 20
"""Tensors begin at multiples of this, where the file names no other."""


class GgufTensor(NamedTuple):
    """Where a tensor lies in a file."""

    shape: tuple[int, ...]
    """Rows before columns, as torch has it; the file has it the other way round."""
    format: int
    offset: int
    """From the start of the file."""


class GgufHeader(NamedTuple):
    """What the header of a GGUF file says."""

    rule: str | None
    """The name of the rule by which a byte-level vocabulary cuts texts into words; None: it has none."""
    architecture: str
    tensors: dict[str, GgufTensor]


def check_gguf(file: Path) -> GgufHeader:
    """Raises ShoalError where the header of a GGUF file is malformed or claims more than the file has. How many bytes a tensor has depends
    on its format, and is checked where it is read."""
    try:
        with file.open("rb") as content:
            return _Header(file, content).check()
    except OSError as error:
        raise ShoalError(f"{file} cannot be read: {error.strerror or error}") from None


class _Header:
    def __init__(self, file: Path, content: IO[bytes]) -> None:
        self.file, self.content = file, content
        self.size = file.stat().st_size
        self.array_items = 0

    def check(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            self._refuse("it does not begin with GGUF")
        if (version := self._number("I")) not in _VERSIONS:
            self._refuse(f"its version is {version}, and versions 2 and 3 are read")
        tensors, entries = self._count("tensors"), self._count("entries")
        fields, names = {}, dict[str, str]()
        for _ in range(entries):
            key = self._text(_LONGEST_KEY).decode("utf-8", "replace")
            kind = self._number("I")
            if key in _NAMES and kind == _STRING:
                names[key] = self._text(_LONGEST_KEY).decode("utf-8", "replace")
            else:
                fields[key] = self._value(kind)
        check_config(fields, str(self.file))
        found = [self._tensor() for _ in range(tensors)]
        if sum(math.prod(one.shape) for _, one in found) * _LEAST_BYTES > self.size:
            self._refuse("its tensors need more bytes than it has")
        align = fields.get("general.alignment", _ALIGNMENT)
        if type(align) is not int or not 1 <= align <= _MOST_ALIGNMENT:
            self._refuse(f"its alignment is {align}")
        start = -(-self.content.tell() // align) * align
        placed = {name: one._replace(offset=start + one.offset) for name, one in found}
        rule = names.get(_RULE) if names.get(_VOCABULARY) == "gpt2" else None
        return GgufHeader(rule, names.get(_ARCHITECTURE, ""), placed)

    def _count(self, what: str) -> int:
        if (count := self._number("Q")) > _MOST_ENTRIES:
            self._refuse(f"it claims {count:,} {what}, and at most {_MOST_ENTRIES:,} are allowed")
        return count

    def _tensor(self) -> tuple[str, GgufTensor]:
        """The name of the next tensor, and where it lies after the header."""
        name = self._text(_LONGEST_KEY).decode("utf-8", "replace")
        if (dimensions := self._number("I")) > _MOST_DIMENSIONS:
            self._refuse(f"a tensor has {dimensions:,} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, GgufTensor(shape, self._number("I"), self._number("Q"))

    def _value(self, kind: int) -> Any:
        """A number, or None for a text or an array, which are skipped."""
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            self._skip_array(self._number("I"), self._number("Q"))
        elif kind in _FORMATS:
            return self._number(_FORMATS[kind])
        else:
            self._refuse(f"an entry is of type {kind}, which there is not")

    def _skip_array(self, kind: int, count: int) -> None:
        self.array_items += count
        if self.array_items > _MOST_ARRAY_ITEMS:
            self._refuse(f"its lists claim {self.array_items:,} items, and at most {_MOST_ARRAY_ITEMS:,} are allowed")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        elif kind in _FORMATS:
            self._skip(count * struct.calcsize(f"<{_FORMATS[kind]}"))
        else:
            self._refuse(f"a list has items of type {kind}")

    def _text(self, longest: int) -> bytes:
        if (length := self._number("Q")) > longest:
            self._refuse(f"a name has {length:,} bytes")
        return self._bytes(length)

    def _skip(self, length: int) -> None:
        if self.content.tell() + length > self.size:
            self._refuse(f"a part of {length:,} bytes reaches beyond its end")
        self.content.seek(length, 1)

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]

    def _bytes(self, length: int) -> bytes:
        content = self.content.read(length)
        if len(content) != length:
            self._refuse("it ends within its header")
        return content

    def _refuse(self, reason: str) -> NoReturn:
        raise ShoalError(f"{self.file} is no GGUF file that can be read: {reason}")
