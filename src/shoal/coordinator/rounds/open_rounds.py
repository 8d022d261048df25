"""Open rounds: who has sent to which, and whom they still wait for. Counted as it happens, so that asking costs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.coordinator.effects import Frames
from shoal.coordinator.state import HeldContribution, Key, key_of


@dataclass
class Round:
    """Contributions that will make one version."""

    held: dict[Key, HeldContribution] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    """How many contributions of each worker are in it."""
    on_time: set[str] = field(default_factory=set)
    """Workers that have sent for this very round, and not only what came too late for an earlier one."""
    opened_at: float | None = None
    """When the first one came, or the round before it closed; not known before the clock has been read."""
    present: int = 0
    """Workers that are active now and have sent for this round."""
    gone: int = 0
    """Workers that have sent and are not active now."""
    quorum_at: float | None = None
    """When it had enough contributions to close without the others."""

    @property
    def workers(self) -> int:
        """How many different workers have sent."""
        return len(self.sent)


class Rounds:
    """All open rounds, by number: the version they are made on."""

    def __init__(self) -> None:
        self.open: dict[int, Round] = {}
        self.active: set[str] = set()
        """Workers that have weights, so rounds wait for them."""
        self.absent: set[str] = set()
        """Workers that a round closed without, and that have been silent since: they may be dead, so no round waits for them."""
        self.returning: set[str] = set()
        """Workers that have come back and have no weights yet: the round that they were in waits for them, and no other."""

    def activate(self, name: str) -> None:
        self.absent.discard(name)
        self.returning.discard(name)
        if name not in self.active:
            self.active.add(name)
            self._recount(name, 1)

    def miss(self, number: int) -> None:
        """A round closes. A worker that is missing in it is waited for again when there is a sign of it."""
        for name in self.active - self.open[number].on_time:
            self.deactivate(name)
            self.absent.add(name)
        self.returning.clear()

    def awaited(self, number: int) -> int:
        """Workers that a round waits for beside the active ones."""
        there = self.open.get(number)
        return len(self.returning - there.on_time if there else self.returning)

    def deactivate(self, name: str) -> None:
        self.absent.discard(name)
        self.returning.discard(name)
        if name in self.active:
            self.active.remove(name)
            self._recount(name, -1)

    def _recount(self, name: str, change: int) -> None:
        for there in self.open.values():
            if name in there.on_time:
                there.present += change
            if name in there.sent:
                there.gone -= change

    def hold(self, number: int, held: HeldContribution) -> None:
        """Keep a contribution until its round closes, beside others of the same worker."""
        there, name = self.open.setdefault(number, Round()), held.record["worker"]
        there.held[held.key] = held
        there.gone += name not in there.sent and name not in self.active
        there.sent[name] = there.sent.get(name, 0) + 1
        if name not in there.on_time and not held.record.get("late"):
            there.on_time.add(name)
            there.present += name in self.active

    def holds(self, record: dict[str, Any]) -> bool:
        there = self.open.get(record["round"])
        return there is not None and key_of(record) in there.held

    def reachable(self, number: int) -> int:
        """Workers that have sent, or still may."""
        there = self.open.get(number)
        return len(self.active) + (there.gone if there else 0)

    def sent_by(self, worker: str, number: int) -> int:
        """How many contributions of a worker are in a round."""
        there = self.open.get(number)
        return there.sent.get(worker, 0) if there else 0

    def newest_of(self, worker: str) -> int:
        """The last open round that holds a contribution of a worker; -1: none does."""
        if not self.open:
            return -1
        return max((number for number, there in self.open.items() if worker in there.sent), default=-1)

    def workers(self, number: int) -> int:
        """How many different workers have sent."""
        there = self.open.get(number)
        return there.workers if there else 0

    def pending(self) -> list[tuple[dict[str, Any], Frames]]:
        """What a journal must begin with, so that the snapshot it follows and the journal together are all there is."""
        return [(held.record | {"kind": "held"}, held.frames) for number in sorted(self.open) for held in self.open[number].held.values()]
