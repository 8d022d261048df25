"""What a worker says it did, held against what it was given to do.

Batches and samples follow from the unit or the plan. What counts in them (tokens that are not padding) only the worker knows, so its word
is taken up to what they can hold. Figures are for people: one that is not finite, or absurdly large, is dropped and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.coordinator.run_plan import RunPlan
from shoal.coordinator.units.cut import DataUnit
from shoal.protocol.messages import Contribute, Delivered
from shoal.updates.expert_subsets import why_not_held

LARGEST_FIGURE = 1e12
_MOST_FIGURES, _MOST_OF_ONE = 4096, 256
"""Names of figures in a run, and those that one worker may bring: whoever makes up ever new ones fills no memory, and takes away only what
others come with later. What the run's own task tells (`Plan.figures`) always has its place."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.,:/ -]{1,128}")
_MOST_SKIPPED = 64
"""Contributions that a worker may have made without sending them: they were not finite, or a crash forgot that they were turned away."""
MOST_UNRECORDED = _MOST_SKIPPED // 2
"""Contributions that a worker may be seen to send, and that are turned away, before it is recorded how far it has come."""


class PlausibilityChecks:
    """The bounds of a plan."""

    def __init__(self, plan: RunPlan, most_batches: int, refused: dict[str, int]) -> None:
        """`refused`: where figures that are left out are counted."""
        self.plan, self.most_batches, self.refused = plan, most_batches, refused
        self._names: set[str] = set(plan.figures)
        self._brought: Counter[str] = Counter()
        """How many of the names each worker was the first to tell."""

    # --- what a contribution was made of ---------------------------------------------------------------

    def bounded(self, asked: Contribute, worker: str) -> Contribute:
        """A contribution from a worker's own seat, with what can be true of it."""
        samples = asked.samples if self.plan.samples_per_batch is None else min(asked.samples, asked.batches * self.plan.samples_per_batch)
        weight, metrics = self._weight(asked.weight, samples), self.metrics(asked.metrics, worker)
        if (samples, weight) == (asked.samples, asked.weight) and len(metrics) == len(asked.metrics):
            return asked
        return asked._replace(samples=samples, weight=weight, metrics=metrics)

    def bounded_unit(self, asked: Delivered) -> Delivered:
        """What was learned from a unit: the unit says of how many samples."""
        samples = self.samples_of(DataUnit(asked.epoch, asked.start, asked.batches))
        samples = asked.samples if samples is None else samples
        metrics = self.metrics(asked.metrics, asked.worker)
        return asked._replace(samples=samples, weight=self._weight(asked.weight, samples), metrics=metrics)

    def samples_of(self, unit: DataUnit) -> int | None:
        """Samples in a unit; None: nobody said how large batches are."""
        each, whole = self.plan.samples_per_batch, self.plan.samples_per_epoch
        if each is None or whole is None:
            return None
        return max(1, min(whole, (unit.start + unit.batches) * each) - unit.start * each)

    def _weight(self, claimed: float, samples: int) -> float:
        return claimed if self.plan.samples_per_batch is None else min(claimed, samples * self.plan.weight_per_sample)

    def why_not_held(self, experts: Sequence[int]) -> str:
        """Why a worker cannot take part with these experts alone; empty: it can."""
        plan, updates = self.plan, self.plan.updates
        if plan.experts is None:
            return "the model of this run has no experts: a worker holds all of it"
        if updates.aggregation.kind != "mean" or updates.mixing.kind != "none" or updates.memory:
            return "the rule of this run compares contributions, and needs all of every one: a worker holds all experts"
        if plan.spans:
            return "this run exchanges its weights in fragments (strategy.fragments): a worker holds all experts"
        if plan.above is not None:
            return "this is a relay, which passes on what its workers have of all experts: join the coordinator above it"
        return why_not_held(plan.experts, experts)

    # --- where it stands --------------------------------------------------------------------------------

    def in_reach(self, asked: Contribute, seq: int, place: tuple[int, int] | None) -> bool:
        """Whether a worker can have come so far that was last seen to send this number, from this place at the data. None: it goes from
        place to place as it is told, and is held to that elsewhere."""
        if asked.seq > seq + _MOST_SKIPPED:
            return False
        if asked.unit >= 0 or place is None:
            return True
        (epoch, position), far = place, (_MOST_SKIPPED + 1) * asked.batches
        shard = self.plan.batches_per_shard
        if shard is not None and asked.position > shard + asked.batches:
            return False
        if asked.epoch <= epoch:
            return asked.position <= position + far
        if shard is None:
            return asked.epoch - epoch <= far and asked.position <= far
        return (asked.epoch - epoch) * shard + asked.position - position <= far

    # --- figures ----------------------------------------------------------------------------------------

    def figures(self, told: Mapping[str, float]) -> dict[str, float]:
        """Those of a sign of life that people can be shown. The next one takes their place, so nobody keeps their names."""
        if not told:
            return {}
        return self._kept(told, {name: value for name, value in told.items() if _is_sane(value) and _PLAIN_NAME.fullmatch(name)})

    def metrics(self, told: Mapping[str, float], worker: str) -> dict[str, float]:
        """Those of a contribution that go into the run's records."""
        return self._kept(told, {name: value for name, value in told.items() if _is_sane(value) and self._is_known(name, worker)})

    def _kept(self, told: Mapping[str, float], kept: dict[str, float]) -> dict[str, float]:
        if len(kept) < len(told):
            self.refused["figures"] = self.refused.get("figures", 0) + len(told) - len(kept)
        return kept

    def _is_known(self, name: str, worker: str) -> bool:
        if name in self._names:
            return True
        if len(self._names) >= _MOST_FIGURES or self._brought[worker] >= _MOST_OF_ONE or not _PLAIN_NAME.fullmatch(name):
            return False
        self._names.add(name)
        self._brought[worker] += 1
        return True


def _is_sane(value: float) -> bool:
    return abs(value) <= LARGEST_FIGURE  # what is not a number is not
