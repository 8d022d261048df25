"""Measures the contributions of a round before it closes: the loss on held-out data that each of them alone leads to.

The model and the data are the scorer's. Which rounds and batches are measured is drawn at random, and stands in the round's record, so a
replay draws and measures nothing.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shoal.coordinator.effects import Measured
from shoal.coordinator.run_plan import ContributionScorer
from shoal.coordinator.state import Key
from shoal.coordinator.turn import CoordinatorContext, Turn
from shoal.updates import clipping
from shoal.updates.contribution_policy import ContributionPolicy
from shoal.updates.rules.scores import HeldOutLosses, copies

PROBE = 1e-3
"""Length of the step along a typical gradient, relative to the weights: as in training, and far above the rounding of the loss."""
_WORST = 1e9
"""Stands for a loss that is not finite, which JSON has not."""


class RoundScoring:
    """Decides which rounds are measured, and measures them."""

    def __init__(self, context: CoordinatorContext, scorer: ContributionScorer) -> None:
        self.plan, self.replayed, self.scorer = context.plan, context.replayed, scorer
        self.moves = moves_of(context.policies.contribution)

    def measure(self, turn: Turn, number: int, keys: list[Key]) -> dict[str, Any]:
        """The field `scores` of a round's record, where the round is measured."""
        held = self.replayed.rounds.open[number].held
        contributions = [held[key] for key in keys]
        workers = {one.record["worker"] for one in contributions}
        if len(workers) < 2 or (workers <= self.replayed.state.scores.keys() and not self.scorer.chooses()):
            return {}
        learner, span = self.replayed.learner, self.plan.span(number)
        found = measured(self.scorer, learner.vector, learner.buffers, span, [one.vector for one in contributions], self.moves)
        if self.plan.updates.scorer.kept:
            kept = [(one.record, one.frames) for one in contributions]
            turn.emit(Measured(number, learner.vector.clone(), learner.buffers.clone(), kept))
        return {"scores": list(found)}


def moves_of(contribution: ContributionPolicy) -> str:
    """What contributions are: `weights`, a pseudo-gradient (`step`), or a `gradient`."""
    return "weights" if contribution.sends_weights else "step" if contribution.takes_inner_steps else "gradient"


def measured(
    scorer: ContributionScorer,
    weights: Tensor,
    buffers: Tensor,
    span: tuple[int, int] | None,
    vectors: list[Tensor],
    moves: str,
    batches: list[int] | None = None,
) -> HeldOutLosses:
    """Measure contributions. `moves`: as `moves_of` returns; `batches`: those of an earlier measurement, to repeat it."""
    drawn = scorer.draw() if batches is None else batches
    start, end = span or (0, weights.numel())
    before = _finite(scorer.loss(weights, buffers, drawn))
    rate = 1.0 if moves != "gradient" else _probe(weights, vectors)
    after = []
    for vector in vectors:
        moved = weights.clone()
        if moves == "weights":
            moved[start:end] = vector
        else:
            moved[start:end] -= rate * vector
        after.append(_finite(scorer.loss(moved, buffers, drawn)))
    better = [place for place, loss in enumerate(after) if loss < before]
    groups = copies(torch.stack([vectors[place] for place in better])) if better else []
    return HeldOutLosses(drawn, before, after, [[better[row] for row in group] for group in groups])


def _probe(weights: Tensor, vectors: list[Tensor]) -> float:
    """Factor of gradients, the same for all, so that the median one is a step of the length `PROBE`."""
    lengths = [length for length in map(clipping.norm, vectors) if length > 0]
    return PROBE * float(torch.linalg.vector_norm(weights, dtype=torch.float64)) / median(lengths) if lengths else 1.0


def _finite(loss: float) -> float:
    return min(loss, _WORST) if math.isfinite(loss) else _WORST
