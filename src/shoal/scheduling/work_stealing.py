"""Work stealing: near the end, when there are more workers than tasks, an idle worker takes over part of another worker's task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RemainingWork(NamedTuple):
    job: str
    left: int
    """Pieces that are not done; a piece cannot be split."""
    piece_s: float
    """Seconds that the worker takes per piece."""
    kept: int = 2
    """Pieces that stay with the worker, which has started on them."""

    @property
    def ends_in_s(self) -> float:
        return self.left * self.piece_s


class StolenShare(NamedTuple):
    """How a job is split."""

    job: str
    keep: int
    """Pieces that its worker keeps, the next ones. The idle worker gets the others."""


def worth_stealing(burdens: Sequence[RemainingWork], piece_s: float) -> StolenShare | None:
    """What an idle worker that takes `piece_s` per piece should take over: from the worker that would finish last, so much that both finish
    at the same time. None: stealing would not help."""
    for burden in sorted(burdens, key=lambda burden: (-burden.ends_in_s, burden.job)):
        keep = max(burden.kept, round(burden.left * piece_s / (piece_s + burden.piece_s)))
        taken = burden.left - keep
        if taken >= 1 and taken * piece_s < burden.ends_in_s:
            return StolenShare(burden.job, keep)
    return None
