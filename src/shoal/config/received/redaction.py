"""Texts that leave this machine, such as the reason why a worker cannot go on, without what only this machine knows.

Holds: a redacted text contains no value of an environment variable, no name of the user and no path, unless the coordinator itself sent
that very text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath

REMOVED = "[…]"
_SHORTEST_VALUE, _SHORTEST_PART = 4, 8
"""Shorter values of variables are ordinary words, such as `1` and `en`. A part of a value, such as the password of a proxy, is longer."""
_PARTS = re.compile(r"[\s:/@=,;&?]+")
_PATH = re.compile(r"(?:(?<![\w.])~|(?<!\w)[A-Za-z]:|file://)?[\w.@%+-]*[/\\][^\s'\"`<>|,;:()\[\]{}]*")
"""Anything with a slash: absolute and relative paths, and URLs."""
_HINT = re.compile(r" ?\(did you mean [^)]*\)")
"""Names that are near to a missing one: they are names of other files."""


class Redactor:
    """Removes from texts what the coordinator has not sent itself."""

    def __init__(self, sent: str = "", environ: Mapping[str, str] | None = None) -> None:
        """`sent`: all that the coordinator sent."""
        self.sent = sent
        values = (os.environ if environ is None else environ).values()
        self._secrets = sorted({*_values_and_parts(values), *_home_folder()}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        text = _HINT.sub("", text)
        for secret in self._secrets:
            if secret in text and secret not in self.sent:
                text = text.replace(secret, REMOVED)
        unknown = [path for path in _PATH.findall(text) if not self._is_known(path)]
        names = {name for path in unknown for name in (PurePath(path).name, PurePath(path).stem) if len(name) >= _SHORTEST_VALUE}
        for words in sorted({*unknown, *(name for name in names if not self._is_known(name))}, key=len, reverse=True):
            text = text.replace(words, REMOVED)
        return text

    def _is_known(self, path: str) -> bool:
        return path.rstrip(".") in self.sent or not path.strip("/\\.")


def _values_and_parts(values: Iterable[str]) -> Iterable[str]:
    for value in values:
        if len(value) >= _SHORTEST_VALUE:
            yield value
        yield from (part for part in _PARTS.split(value) if len(part) >= _SHORTEST_PART)


def _home_folder() -> Iterable[str]:
    try:
        home = Path.home()
    except RuntimeError:
        return
    yield from (text for text in (str(home), home.name) if len(text) >= _SHORTEST_VALUE)
