"""When a round closes, and what is said and done while there are too few workers for the rule."""

from __future__ import annotations

from shoal.coordinator.book import Book
from shoal.coordinator.effects import Note, Stop
from shoal.coordinator.membership import MISSED_HEARTBEATS
from shoal.coordinator.policies import Barrier, Policy, Quorum
from shoal.coordinator.rounds import Round, Rounds
from shoal.coordinator.state import Plan

GATHERING_S = 30.0


class Closing:
    """Decides from counts alone, so that it may be asked at every message."""

    def __init__(self, plan: Plan, policy: Policy, book: Book) -> None:
        self.plan, self.policy, self.book = plan, policy, book
        self.rounds: Rounds = book.rounds
        several = plan.expected if isinstance(policy.rounds, Barrier) else policy.rounds.contributions
        if isinstance(policy.rounds, Barrier) and policy.rounds.quorum is not None:
            several = policy.rounds.quorum
        self.wanted = min(plan.expected, several) if not isinstance(policy.rounds, Quorum) else 1
        self.gathering = self.wanted > 1
        """Until the expected workers have come: at the start, and when a coordinator comes back. Who needs one alone waits for nobody."""
        self._short_since: float | None = None
        self._noted = ""

    def due(self, number: int, now: float) -> bool:
        """Whether the round may close now."""
        there = self.rounds.open.get(number)
        if there is None:
            return False
        if isinstance(self.policy.rounds, Quorum):
            enough = len(there.held) >= self.policy.rounds.contributions or self.all_settled
            return enough and self.rounds.workers(number) >= self.plan.needed
        if there.opened_at is None:
            there.opened_at = now
        late = self._late(there.opened_at, now)
        if now >= there.opened_at + self._patience_s(number) or len(self.rounds.active) >= self.wanted:
            self.gathering = False
        if self.gathering or len(there.held) < self.plan.needed:
            return False
        if isinstance(self.policy.rounds, Barrier):
            if self.policy.rounds.late_count and self.plan.needed > 1 and self.rounds.workers(number) < self.plan.needed:
                return False  # a worker's late contribution and its own of this round do not make two workers
            return late or self.rounds.complete(number) or self._has_quorum(there, self.policy.rounds, now)
        return len(there.held) >= min(self.policy.rounds.contributions, max(1, len(self.rounds.active)))

    @property
    def all_settled(self) -> bool:
        """Whether no unit is left to do."""
        return self.plan.cut is not None and self.book.settled.all_of(self.plan.cut.total)

    def _has_quorum(self, there: Round, rounds: Barrier, now: float) -> bool:
        """Are enough there, and have the others had their time?"""
        if rounds.quorum is None or len(there.held) < min(rounds.quorum, max(1, len(self.rounds.active))):
            return False
        there.quorum_at = now if there.quorum_at is None else there.quorum_at
        return now >= there.quorum_at + rounds.grace_s

    def _late(self, opened_at: float, now: float) -> bool:
        """Has the round been open for too long?"""
        return isinstance(self.policy.rounds, Barrier) and now >= opened_at + self.policy.rounds.deadline_s

    def _patience_s(self, number: int) -> float:
        """How long those who are ready wait for the others. At the start that is longer: to start a program takes longer than a step."""
        deadline_s = self.policy.rounds.deadline_s if isinstance(self.policy.rounds, Barrier) else 0.0
        return max(GATHERING_S, deadline_s) if number == 0 else deadline_s

    def watch(self, number: int, now: float) -> Note | Stop | None:
        """Too few workers for the rule: wait for more, or stop. It never makes do with a lesser rule.

        Those who are gone get the time to come back: after a crash of the coordinator, all of them have to.
        """
        needed, reachable, interval_s = self.plan.needed, self.rounds.reachable(number), self.plan.heartbeat_interval_s
        if reachable >= needed or needed <= 1:
            self._short_since, self._noted = None, ""
            return None
        self._short_since = now if self._short_since is None else self._short_since
        short_s = now - self._short_since
        text = f"{self.plan.updates.aggregation.kind} needs {needed} contributions and {reachable} workers are here"
        if self.plan.updates.below_quorum == "stop" and number > 0 and short_s > MISSED_HEARTBEATS * interval_s:
            return Stop(f"{text}: stopped, as updates.below_quorum says")
        if self._noted == text or short_s < interval_s:
            return None
        self._noted = text
        return Note(f"{text}: waiting for {needed - reachable} more")
