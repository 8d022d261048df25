"""Weighs the contributions of a round by their workers' scores. It computes from a record alone, so a replay gives the same bits."""

from __future__ import annotations

from typing import Any

from shoal.config.schema.updates import Updates
from shoal.coordinator.state import HeldContribution, State
from shoal.updates.rules.scores import HeldOutLosses, Score, factors, improvements, renewed

_REMEMBERED = 4096
"""Workers whose scores are remembered: those measured last. Audits know this number."""


class WorkerScores:
    """Keeps the scores in the coordinator's state."""

    def __init__(self, updates: Updates, needed: int) -> None:
        """`needed`: contributions of different workers that the aggregation rule needs at least."""
        self.updates, self.needed = updates, needed

    def weigh(
        self, contributions: list[HeldContribution], measured: list[Any] | None, state: State
    ) -> tuple[list[HeldContribution], dict[str, Any]]:
        """The contributions that count, with their weights, and the fields of the round's line in the ledger."""
        workers = [one.record["worker"] for one in contributions]
        if measured is not None:
            before = {name: Score(value, int(count)) for name, (value, count) in state.scores.items()}
            after = renewed(before, improvements(HeldOutLosses(*measured), workers), self.updates.scorer.memory)
            state.scores = {name: list(after[name]) for name in list(after)[-_REMEMBERED:]}
        less = factors({name: Score(value, int(count)) for name, (value, count) in state.scores.items()}, workers)
        line = {"scores": measured} if measured is not None else {}
        if not less:
            return contributions, line
        counted = self._chosen(contributions, less) if self.updates.compares else self._weighted(contributions, less)
        return counted, line | {"factors": less}

    def _weighted(self, contributions: list[HeldContribution], less: dict[str, float]) -> list[HeldContribution]:
        """For a mean: the weights times the factors."""
        return [
            one if (factor := less.get(one.record["worker"], 1.0)) == 1 else _with_weight(one, factor)
            for one in contributions
            if less.get(one.record["worker"], 1.0) > 0
        ]

    def _chosen(self, contributions: list[HeldContribution], less: dict[str, float]) -> list[HeldContribution]:
        """For a rule that compares contributions: those whose worker counts at least half, and never fewer than the rule needs."""
        names = list(dict.fromkeys(one.record["worker"] for one in contributions))
        names.sort(key=lambda name: -less.get(name, 1.0))
        kept = {name for place, name in enumerate(names) if place < self.needed or less.get(name, 1.0) >= 0.5}
        return [one for one in contributions if one.record["worker"] in kept]


def _with_weight(one: HeldContribution, factor: float) -> HeldContribution:
    return HeldContribution(one.record | {"weight": one.record["weight"] * factor}, one.frames, one.vector, one.buffers)
