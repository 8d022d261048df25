"""The source text of Python's standard library, and its Zen: real text that every machine with Python has."""

from __future__ import annotations

import ast
import codecs
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from shoal.data.text.documents import InMemoryDocuments, TextPart
from shoal.errors import ShoalError

_SOURCE_BYTES = 4_000_000
_ZEN_TIMES = 64
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "__phello__"}


def python_source() -> TextPart:
    """The .py files of the standard library of this Python, in the order of their paths, up to about 4 MB."""
    library = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    size = 0
    for file in sorted(_source_files(library), key=lambda file: file.relative_to(library).parts):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few modules declare another encoding
            continue
        size += len(text)
        if size > _SOURCE_BYTES:
            break
        if text:
            texts.append(text)
    if not texts:
        raise ShoalError(f"this Python has no source text of its standard library in {library}: choose another data.source")
    return TextPart("python-source", InMemoryDocuments(texts), None)


def zen_of_python() -> TextPart:
    """The Zen of Python by Tim Peters, repeated so that a model learns it by heart."""
    poem = zen()
    return TextPart("zen", InMemoryDocuments([poem] * _ZEN_TIMES), None)


def zen() -> str:
    """The poem, decoded from rot13. Importing its module would print it, so the module is parsed instead."""
    file = Path(sysconfig.get_path("stdlib")) / "this.py"
    if not file.exists():
        raise ShoalError(f"this Python has no Zen in {file}: choose another data.source")
    first = ast.parse(file.read_text(encoding="utf-8")).body[0]
    assert isinstance(first, ast.Assign)
    return codecs.decode(ast.literal_eval(first.value), "rot13") + "\n"


def _source_files(library: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _NOT_SOURCE]
        # Names that begin with _sysconfigdata say how this Python was built, not how it works.
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
