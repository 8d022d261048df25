"""Rounds that are due become new weights; while too few workers are here for the aggregation rule, the run waits or stops."""

from __future__ import annotations

from shoal.config.schema.updates import Bucketing
from shoal.coordinator.effects import Note
from shoal.coordinator.members.table import MISSED_HEARTBEATS
from shoal.coordinator.rounds.scoring import RoundScoring
from shoal.coordinator.turn import CoordinatorContext, Turn

GATHERING_S = 30.0
"""Time that the first round waits for workers that have not joined, at least."""
_MOST_NAMED = 8


class RoundClosing:
    """Closes rounds. It decides from counts alone, so checking at every message is cheap."""

    def __init__(self, context: CoordinatorContext) -> None:
        self.plan, self.policy, self.completion = context.plan, context.policies.rounds, context.completion
        self.rounds = context.replayed.rounds
        self.scoring = RoundScoring(context, context.plan.scorer) if context.plan.scorer is not None else None
        self.first_workers = self.policy.first_workers(self.plan.expected)
        self.gathering = self.first_workers > 1
        """Whether expected workers are still awaited: at the start, and after the coordinator restarted."""
        self._short_since: float | None = None
        self._noted = ""
        self._told = False
        self._weak = False
        """Whether the last round had too few workers for the rule to withstand any false contribution."""

    def close_due(self, turn: Turn) -> bool:
        """Close every round that is due; return whether there was one. Each makes the next version, or a relay's next contribution."""
        before = len(self.rounds.open)
        while self._is_due(turn, turn.state.version, turn.now):
            self._close(turn, turn.state.version)
        closed = len(self.rounds.open) < before
        turn.release_held |= closed
        if self.gathering and not (self._told or turn.state.paused or self.completion.finished):
            self._tell_of_gathering(turn, turn.state.version)
        return closed

    def _is_due(self, turn: Turn, number: int, now: float) -> bool:
        open_round = self.rounds.open.get(number)
        if open_round is None or turn.state.paused or turn.replayed.relayed is not None or self.completion.finished:
            return False
        if open_round.opened_at is None:
            open_round.opened_at = now
        active = len(self.rounds.active) + self.rounds.awaited(number)
        if self.gathering:
            self.gathering = active + len(turn.state.away) < self.first_workers and now < open_round.opened_at + self._gathering_s(number)
        return not self.gathering and self.policy.due(open_round, active, self.plan.needed, now, turn.replayed.round_is_complete)

    def _gathering_s(self, number: int) -> float:
        """How long workers that are ready wait for the others. The first round waits longer: processes have to start first."""
        return max(GATHERING_S, self.policy.deadline_s) if number == 0 else self.policy.deadline_s

    def _close(self, turn: Turn, number: int) -> None:
        keys = sorted(self.rounds.open[number].held)
        if (note := self._weakness(self.rounds.workers(number))) is not None:
            turn.emit(note)
        if self.policy.waits_for_all:
            self.rounds.miss(number)
        kind = "closed" if self.plan.above is None else "combined"
        scores = self.scoring.measure(turn, number, keys) if self.scoring is not None else {}
        turn.record({"kind": kind, "round": number, "contributions": [list(key) for key in keys], **scores})

    def _weakness(self, workers: int) -> Note | None:
        """A warning for the first round in a row that closes with too few workers for the aggregation rule to protect it."""
        updates = self.plan.updates
        bucket = updates.mixing.size if isinstance(updates.mixing, Bucketing) else 1
        rule, before = updates.aggregation, self._weak
        self._weak = -(-workers // bucket) < rule.works_from
        if before or not self._weak:
            return None
        few = f"{workers} worker{'s' * (workers != 1)}" + (f" in buckets of {bucket}" if bucket > 1 else "")
        return Note(f"warning: with contributions of {few}, {rule.kind} gives no protection: it needs {rule.works_from}; this is a mean")

    def watch_quorum(self, turn: Turn) -> None:
        """Wait for more workers, or stop, while there are too few for the rule, which is never weakened: gone workers may come back."""
        number, now, needed = turn.state.version, turn.now, self.plan.needed
        reachable, interval_s = self.rounds.reachable(number), self.plan.heartbeat_interval_s
        if reachable >= needed:
            self._short_since, self._noted = None, ""
            return
        self._short_since = now if self._short_since is None else self._short_since
        short_s = now - self._short_since
        text = f"{self.plan.updates.aggregation.kind} needs {needed} contributions and {reachable} workers are here"
        if self.plan.updates.below_quorum == "stop" and number > 0 and short_s > MISSED_HEARTBEATS * interval_s:
            turn.stop(self.completion, f"{text}: stopped, as updates.below_quorum says")
        elif self._noted != text and short_s >= interval_s:
            self._noted = text
            turn.emit(Note(f"{text}: waiting for {needed - reachable} more{self._missing()}"))

    def _tell_of_gathering(self, turn: Turn, number: int) -> None:
        """A line, once, while workers that are ready wait for others that may still join."""
        opened = self.rounds.open.get(number)
        if opened is None or opened.opened_at is None or turn.now < opened.opened_at + self.plan.heartbeat_interval_s:
            return
        if self.rounds.reachable(number) < self.plan.needed:
            return  # `watch_quorum` says so
        here = len(self.rounds.active) + self.rounds.awaited(number) + len(turn.state.away)
        self._told, few = True, self.first_workers - here
        more = f"{few} more worker{'s' * (few != 1)}"
        turn.emit(Note(f"the round waits up to {self._gathering_s(number):.0f} s for {more}{self._missing()}"))

    def _missing(self) -> str:
        """The workers that the configuration names and that are not here, as text."""
        absent = [name for name in self.plan.listed if name not in self.rounds.active]
        shown = [f"{name} ({self.plan.listed[name]})" if self.plan.listed[name] else name for name in absent[:_MOST_NAMED]]
        more = f" and {len(absent) - _MOST_NAMED} others" if len(absent) > _MOST_NAMED else ""
        return f"; {', '.join(shown)}{more} {'is' if len(absent) == 1 else 'are'} missing" if absent else ""
