"""Errors that a user can fix, and text from other machines made safe to print.

ShoalError             exit code 2, no traceback
└── ConfigError        one or more problems in the configuration
"""

from __future__ import annotations


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
