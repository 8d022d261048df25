"""Open rounds: which workers have sent to which round, and which are awaited. All counts are kept up to date, so reading them is cheap."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.coordinator.state import HeldContribution, Key, key_of
from shoal.protocol.messages import Frames


@dataclass
class Round:
    """Contributions that will make one version."""

    held: dict[Key, HeldContribution] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    """By worker: number of its contributions in this round."""
    on_time: set[str] = field(default_factory=set)
    """Workers that have sent for this round, not only late contributions for an earlier one."""
    opened_at: float | None = None
    """When the first contribution came, or the round before closed; None until the first check."""
    present: int = 0
    """Number of active workers that have sent for this round."""
    gone: int = 0
    """Number of workers that have sent and are not active any more."""
    quorum_at: float | None = None
    """When the round had its quorum."""

    @property
    def workers(self) -> int:
        """Number of different workers that have sent."""
        return len(self.sent)


_EMPTY = Round()
"""Stands for a round without contributions, and never gets one."""


class Rounds:
    """All open rounds, by number: the version that they build on."""

    def __init__(self) -> None:
        self.open: dict[int, Round] = {}
        self.active: set[str] = set()
        """Workers that have weights: rounds wait for them."""
        self.absent: set[str] = set()
        """Workers that a round closed without and that have been silent since: no round waits for them."""
        self.returning: set[str] = set()
        """Workers that have rejoined and have no weights yet: only the round that they were in waits for them."""

    def activate(self, name: str) -> None:
        self.absent.discard(name)
        self.returning.discard(name)
        if name not in self.active:
            self.active.add(name)
            self._recount(name, 1)

    def miss(self, number: int) -> None:
        """Deactivate the workers that a closing round is missing, until their next message."""
        for name in self.active - self.open[number].on_time:
            self.deactivate(name)
            self.absent.add(name)
        self.returning.clear()

    def awaited(self, number: int) -> int:
        """Number of workers that a round waits for besides the active ones."""
        return len(self.returning - self.open.get(number, _EMPTY).on_time)

    def deactivate(self, name: str) -> None:
        self.absent.discard(name)
        self.returning.discard(name)
        if name in self.active:
            self.active.remove(name)
            self._recount(name, -1)

    def _recount(self, name: str, change: int) -> None:
        for open_round in self.open.values():
            if name in open_round.on_time:
                open_round.present += change
            if name in open_round.sent:
                open_round.gone -= change

    def hold(self, number: int, held: HeldContribution) -> None:
        """Add a contribution to its round, besides others of the same worker."""
        open_round, name = self.open.setdefault(number, Round()), held.record["worker"]
        open_round.held[held.key] = held
        open_round.gone += name not in open_round.sent and name not in self.active
        open_round.sent[name] = open_round.sent.get(name, 0) + 1
        if name not in open_round.on_time and not held.record.get("late"):
            open_round.on_time.add(name)
            open_round.present += name in self.active

    def holds(self, record: dict[str, Any]) -> bool:
        return key_of(record) in self.open.get(record["round"], _EMPTY).held

    def reachable(self, number: int) -> int:
        """Number of workers that have sent or may still send."""
        return len(self.active) + self.open.get(number, _EMPTY).gone

    def sent_by(self, worker: str, number: int) -> int:
        """Number of a worker's contributions in a round."""
        return self.open.get(number, _EMPTY).sent.get(worker, 0)

    def newest_of(self, worker: str) -> int:
        """The last open round with a contribution of a worker; -1: none."""
        return max((number for number, open_round in self.open.items() if worker in open_round.sent), default=-1)

    def workers(self, number: int) -> int:
        """Number of different workers that have sent."""
        return self.open.get(number, _EMPTY).workers

    def pending(self) -> list[tuple[dict[str, Any], Frames]]:
        """Records of all held contributions, with which the journal after a snapshot begins."""
        return [(held.record | {"kind": "held"}, held.frames) for number in sorted(self.open) for held in self.open[number].held.values()]
