"""Errors that a user can fix, and text that is made safe to print: from other machines, or with secrets in it.

ShoalError             exit code 2, no traceback
└── ConfigError        one or more problems in the configuration
"""

from __future__ import annotations

import re

_MASK = "********"
# A key with such an ending may hold a secret even if the schema does not know it (a misspelt key, a syntax error); `per_token` does not.
_SECRET_IN_LINE = r"""(\b(?:\w*_)?(?<!per_)(?:pas+w\w*|secrets?|tok+e?n|api_?key|(?<!\w)key)["']?\s*[:=]\s*)(?!\$\{)(\S.*)$"""
_IN_ADDRESS = r"(://[^/@\s:]*):(?!\$\{)[^@/\s]+@"


class ShoalError(Exception):
    """An error that the user can fix: the message says what is wrong, where, and what to do."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or of a library below it means that memory ran out."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in ("out of memory", "can't allocate memory", "alloc_failed"))


def printable(text: str) -> str:
    """Text from another machine without control characters, which could change the terminal."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


def masked(line: str) -> str:
    """A line of a configuration, or an argument, with probable secrets masked."""
    line = re.sub(_IN_ADDRESS, rf"\1:{_MASK}@", line)
    return re.sub(_SECRET_IN_LINE, rf"\1{_MASK}", line, flags=re.IGNORECASE)
