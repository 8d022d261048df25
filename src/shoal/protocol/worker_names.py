"""Names of workers: what people call their computers, and nothing that is more than a name in a file, a page, a log or a query.

`migrations/001/leases.sql` has the same rule for students, coarser by what only Unicode's tables know; `parse_from_leases` checks the rest.
"""

from __future__ import annotations

import unicodedata
from typing import Any

LONGEST_NAME = 64
"""Bytes in UTF-8, so that a file may be named after a worker."""
NAME_RULE = (
    f"a name has letters and digits of any script, spaces and . _ - ' ( ) +, {LONGEST_NAME} bytes at most; it begins with a letter or a "
    "digit, and ends with neither a space nor a dot"
)
_MARKS = " ._-'’()+"
_CATEGORIES = ("Lu", "Ll", "Lt", "Lm", "Lo", "Nd", "Mn", "Mc")
_INVISIBLE = {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)}
"""Letters and accents that show nothing."""
_MOST_ACCENTS = 2
"""Accents in a row: more would be drawn over the lines above and below."""


def is_worker_name(value: Any) -> bool:
    """Whether a value is the name of a worker, as `NAME_RULE` says."""
    return (
        type(value) is str
        and 0 < len(value.encode(errors="replace")) <= LONGEST_NAME
        and value[0].isalnum()
        and value[-1] not in " ."
        and "  " not in value
        and all(map(_is_allowed, value))
        and not _has_tower(value)
        and unicodedata.is_normalized("NFC", value)
    )


def _is_allowed(letter: str) -> bool:
    return letter in _MARKS or (unicodedata.category(letter) in _CATEGORIES and ord(letter) not in _INVISIBLE)


def _has_tower(name: str) -> bool:
    kinds = "".join("M" if unicodedata.category(letter) == "Mn" else "-" for letter in name)
    return "M" * (_MOST_ACCENTS + 1) in kinds


def with_ending(name: str, ending: str) -> str:
    """The name with an ending, shortened where it would be too long."""
    while len((name + ending).encode()) > LONGEST_NAME:
        name = name[:-1]
    return name + ending


def name_of(text: str) -> str:
    """The name that is meant by a text which was typed, or by a machine's own name; empty where it cannot be one."""
    name = unicodedata.normalize("NFC", text.strip())
    return name if is_worker_name(name) else ""
