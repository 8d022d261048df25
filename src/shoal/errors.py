"""Errors a user can cause, and can mend; and words of strangers, made fit to be shown.

ShoalError             exit code 2, no traceback
└── ConfigError        one or more problems in the configuration
"""

from __future__ import annotations


class ShoalError(Exception):
    """Something the user can put right: the message says what, where, and what to do."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has no room: torch's own do, and so do those of the libraries below it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in ("out of memory", "can't allocate memory", "alloc_failed"))


def printable(text: str) -> str:
    """What strangers say of themselves is shown to people, and must not steer their terminals."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
