"""Who comes to a class and who leaves: the database knows who is here, and this says what has changed since it was last asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.errors import printable

_MOST_NAMED = 5
"""A crowd at the door does not fill people's screens: beyond so many at a time, only their number is told."""


class ArrivalNotices:
    """The names of those who were here a moment ago."""

    def __init__(self) -> None:
        self.here: frozenset[str] = frozenset()

    def look(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """A sentence for each who came or left since the last look."""
        before, self.here = self.here, frozenset(printable(str(row["name"])) for row in rows if row["alive"])
        yield from _told(self.here - before, "joined")
        yield from _told(before - self.here, "left")


def _told(names: frozenset[str], what: str) -> Iterator[str]:
    if len(names) > _MOST_NAMED:
        yield f"{len(names)} workers {what}"
        return
    yield from (f"{name} {what}" for name in sorted(names))
