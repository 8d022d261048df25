"""Near the end there are more workers than tasks: a worker that has nothing takes over a part of what another has before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class RemainingWork(NamedTuple):
    """What a worker has before it."""

    job: str
    left: int
    """Pieces that are not done; each is done whole."""
    piece_s: float
    """How long the worker takes for one."""

    @property
    def ends_in_s(self) -> float:
        return self.left * self.piece_s


class StolenShare(NamedTuple):
    """How a job is cut in two."""

    job: str
    keep: int
    """Pieces that its worker keeps: the next ones. The others are the thief's."""


def worth_stealing(burdens: Sequence[RemainingWork], piece_s: float, least: int = 2) -> StolenShare | None:
    """What an idle worker that takes `piece_s` for a piece should take over: of whoever would be done last, so much that both are done at
    the same time. None: nobody would be done sooner. `least`: pieces that stay with the worker at least, since it is at them already."""
    for burden in sorted(burdens, key=lambda burden: (-burden.ends_in_s, burden.job)):
        keep = max(least, round(burden.left * piece_s / (piece_s + burden.piece_s)))
        taken = burden.left - keep
        if taken >= 1 and taken * piece_s < burden.ends_in_s:
            return StolenShare(burden.job, keep)
    return None
