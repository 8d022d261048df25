"""Thirteen mistakes that a coordinator could have, each planted by a patch: the bug finder must find every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.coordinator import machine
from shoal.coordinator.durable import replayed_state
from shoal.coordinator.effects import Persist, Reply
from shoal.coordinator.members import table
from shoal.coordinator.round_policies import Barrier
from shoal.coordinator.rounds import contributions, open_rounds
from shoal.coordinator.units import lease_table
from shoal.updates import staleness

Patch = Callable[[Any], None]
"""Given pytest's monkeypatch."""


def _forgets_repeats(patch: Any) -> None:
    """A contribution that comes again is a new one."""
    real = contributions.ContributionHandler.take

    def take(self: Any, turn: Any, event: Any, asked: Any, worker: Any) -> None:
        turn.state.sequences.pop(worker.name, None)
        turn.state.positions.pop(str(worker.seat), None)
        real(self, turn, event, asked, worker)

    patch.setattr(contributions.ContributionHandler, "take", take)


def _confirms_before_it_keeps(patch: Any) -> None:
    """Answers go out before the records that they rest on are kept."""
    real = machine.Coordinator.handle

    def handle(self: Any, event: Any, now: float) -> list[Any]:
        return sorted(real(self, event, now), key=lambda effect: not isinstance(effect, Reply))

    patch.setattr(machine.Coordinator, "handle", handle)


def _keeps_no_round_that_closed(patch: Any) -> None:
    """That a round closed is not kept."""
    real = machine.Coordinator.handle

    def handle(self: Any, event: Any, now: float) -> list[Any]:
        return [one for one in real(self, event, now) if not (isinstance(one, Persist) and one.record["kind"] == "closed")]

    patch.setattr(machine.Coordinator, "handle", handle)


def _forgets_open_rounds(patch: Any) -> None:
    """A snapshot does not take along what waits in open rounds."""
    patch.setattr(replayed_state.ReplayedState, "pending", lambda self: [])


def _waits_for_the_dead(patch: Any) -> None:
    """A round waits for all, whatever its deadline."""

    def due(self: Any, there: Any, active: int, needed: int, now: float, no_more: bool) -> bool:
        return there.workers >= needed and there.present == active

    patch.setattr(Barrier, "due", due)


def _never_evicts(patch: Any) -> None:
    """Whoever is silent stays, and rounds that closed without somebody wait for it again."""
    patch.setattr(table.MemberTable, "next_silent", lambda self, now: None)
    patch.setattr(open_rounds.Rounds, "miss", lambda self, number: None)
    patch.setattr(Barrier, "deadline_s", 1e9, raising=False)
    _waits_for_the_dead(patch)


def _holds_answers_for_ever(patch: Any) -> None:
    """Whoever waits for a round hears nothing until it closes."""
    patch.setattr(contributions.ContributionHandler, "reassure", lambda self, turn: None)


def _drops_one_of_several(patch: Any) -> None:
    """Of several contributions of a worker in a round only the last is kept."""
    real = open_rounds.Rounds.hold

    def hold(self: Any, number: int, held: Any) -> None:
        there = self.open.get(number)
        for key in [key for key in there.held if key[0] == held.record["worker"]] if there else []:
            del there.held[key]
        real(self, number, held)

    patch.setattr(open_rounds.Rounds, "hold", hold)


def _lends_twice(patch: Any) -> None:
    """A unit that was claimed may be claimed by another, too, and either result is taken."""
    real = lease_table.Leases.claim

    def claim(self: Any, worker: str, now: float) -> Any:
        lease = real(self, worker, now)
        if lease is not None:
            self._pending[lease.unit] = None
        return lease

    patch.setattr(lease_table.Leases, "claim", claim)
    patch.setattr(lease_table.Leases, "holds", lambda self, worker, unit, now: True)

    def submit(self: Any, worker: str, unit: int, version: int, now: float) -> str:
        return lease_table.ACCEPTED

    patch.setattr(lease_table.Leases, "submit", submit)


def _counts_a_share_twice(patch: Any) -> None:
    """A late contribution is weighed twice by its lag."""
    real = replayed_state.ReplayedState._combine

    def combine(self: Any, held: Any) -> Any:
        update, buffers, share = real(self, held)
        return update, buffers, share * held[0].record["share"]

    patch.setattr(replayed_state.ReplayedState, "_combine", combine)


def _counts_the_head_of_a_journal_again(patch: Any) -> None:
    """What a journal repeats of the one before it, since the disk took no snapshot between them, is counted once more."""
    patch.setattr(open_rounds.Rounds, "holds", lambda self, record: False)


def _late_units_count_in_full(patch: Any) -> None:
    """A unit's result counts in full, whatever its lag."""
    patch.setattr(staleness, "weight", lambda lag: 1.0)


def _units_may_lag_without_end(patch: Any) -> None:
    """A lease outlives any number of versions."""
    real = lease_table.Leases.issue

    def issue(self: Any, version: int, units: Any, quorum: Any, now: float, most_lag: int = 0) -> Any:
        return real(self, version, units, quorum, now, 10**6)

    patch.setattr(lease_table.Leases, "issue", issue)


MISTAKES: dict[str, Patch] = {
    "a contribution that comes again is taken again": _forgets_repeats,
    "answers go out before their records are kept": _confirms_before_it_keeps,
    "that a round closed is not kept": _keeps_no_round_that_closed,
    "a snapshot forgets open rounds": _forgets_open_rounds,
    "a round has no deadline": _waits_for_the_dead,
    "a silent worker is never taken for dead": _never_evicts,
    "answers are held back for ever": _holds_answers_for_ever,
    "one of several contributions of a worker is dropped": _drops_one_of_several,
    "a unit is lent to two workers": _lends_twice,
    "a late contribution is weighed twice": _counts_a_share_twice,
    "what two journals hold is counted twice": _counts_the_head_of_a_journal_again,
    "a late unit counts in full": _late_units_count_in_full,
    "a unit may lag without end": _units_may_lag_without_end,
}
