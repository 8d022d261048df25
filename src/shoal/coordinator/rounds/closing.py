"""When a round closes, and what happens while there are too few workers for the aggregation rule."""

from __future__ import annotations

from shoal.config.schema.updates import Bucketing
from shoal.coordinator.durable.replayed_state import ReplayedState
from shoal.coordinator.effects import Note, StopRun
from shoal.coordinator.members.table import MISSED_HEARTBEATS
from shoal.coordinator.policies import CoordinatorPolicies
from shoal.coordinator.rounds.open_rounds import Rounds
from shoal.coordinator.state import RunPlan

GATHERING_S = 30.0
_MOST_NAMED = 8


class RoundClosing:
    """Decides from counts alone, so that it may be asked at every message."""

    def __init__(self, plan: RunPlan, policies: CoordinatorPolicies, book: ReplayedState) -> None:
        self.plan, self.policy, self.book = plan, policies.rounds, book
        self.rounds: Rounds = book.rounds
        self.first_workers = self.policy.first_workers(plan.expected)
        self.gathering = self.first_workers > 1
        """Until the expected workers have come: at the start, and when a coordinator comes back."""
        self._short_since: float | None = None
        self._noted = ""
        self._weak = False
        """Whether the last round had too few workers for the rule to withstand anything."""

    def due(self, number: int, now: float) -> bool:
        """Whether the round may close now."""
        there = self.rounds.open.get(number)
        if there is None:
            return False
        if there.opened_at is None:
            there.opened_at = now
        active = len(self.rounds.active) + self.rounds.awaited(number)
        if self.gathering:
            self.gathering = active < self.first_workers and now < there.opened_at + self._patience_s(number)
        return not self.gathering and self.policy.due(there, active, self.plan.needed, now, self.all_settled)

    @property
    def all_settled(self) -> bool:
        """Whether the data is cut into units, and none is left to do."""
        return self.plan.cut is not None and self.book.settled.all_of(self.plan.cut.total)

    def _patience_s(self, number: int) -> float:
        """How long those who are ready wait for the others. At the start that is longer: to start a program takes longer than a step."""
        return max(GATHERING_S, self.policy.deadline_s) if number == 0 else self.policy.deadline_s

    def watch(self, number: int, now: float) -> Note | StopRun | None:
        """Too few workers for the rule: wait for more, or stop. It never makes do with a lesser rule.

        Workers that are gone get the time to come back: after a crash of the coordinator, all of them have to.
        """
        needed, reachable, interval_s = self.plan.needed, self.rounds.reachable(number), self.plan.heartbeat_interval_s
        if reachable >= needed:
            self._short_since, self._noted = None, ""
            return None
        self._short_since = now if self._short_since is None else self._short_since
        short_s = now - self._short_since
        text = f"{self.plan.updates.aggregation.kind} needs {needed} contributions and {reachable} workers are here"
        if self.plan.updates.below_quorum == "stop" and number > 0 and short_s > MISSED_HEARTBEATS * interval_s:
            return StopRun(f"{text}: stopped, as updates.below_quorum says")
        if self._noted == text or short_s < interval_s:
            return None
        self._noted = text
        return Note(f"{text}: waiting for {needed - reachable} more{self._missing()}")

    def _missing(self) -> str:
        """Who of those that the settings name is not here, for people."""
        absent = [name for name in self.plan.listed if name not in self.rounds.active]
        shown = [f"{name} ({self.plan.listed[name]})" if self.plan.listed[name] else name for name in absent[:_MOST_NAMED]]
        more = f" and {len(absent) - _MOST_NAMED} others" if len(absent) > _MOST_NAMED else ""
        return f"; {', '.join(shown)}{more} {'is' if len(absent) == 1 else 'are'} missing" if absent else ""

    def judge(self, workers: int) -> Note | None:
        """A word on a round that closes with contributions of so many workers, where those are too few for the rule to do its job."""
        updates = self.plan.updates
        bucket = updates.mixing.size if isinstance(updates.mixing, Bucketing) else 1
        rule, before = updates.aggregation, self._weak
        self._weak = -(-workers // bucket) < rule.works_from
        if before or not self._weak:
            return None
        few = f"{workers} worker{'s' * (workers != 1)}" + (f" in buckets of {bucket}" if bucket > 1 else "")
        return Note(f"warning: {rule.kind} withstands nothing with contributions of {few}: it takes {rule.works_from}; this is a mean")
