"""Plausibility of a worker's claims: batches, samples, weight, progress and metrics.

Batches and samples follow from the unit or the plan. Only the worker knows the weight of its samples (tokens without padding), so its claim
counts up to what they can hold. Metrics are for the user: one that is not finite, or absurdly large, is dropped and counted.
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
"""Bounds on metric names in a run, and on names that one worker introduces, so that made-up names cannot fill the memory. Metrics of the
run's own task (`RunPlan.figures`) are always accepted."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.,:/ -]{1,128}")
_MOST_SKIPPED = 64
"""Numbers that a worker may skip: contributions that were not finite, or whose rejection a crash forgot."""
MOST_UNRECORDED = _MOST_SKIPPED // 2
"""Rejected contributions in a row after which a worker's progress is recorded."""


class PlausibilityChecks:
    """Checks of workers' claims against the plan."""

    def __init__(self, plan: RunPlan, most_batches: int, refused: dict[str, int]) -> None:
        """`refused`: counter of dropped metrics, among others."""
        self.plan, self.most_batches, self.refused = plan, most_batches, refused
        self._names: set[str] = set(plan.figures)
        self._brought: Counter[str] = Counter()
        """By worker: number of names that it introduced."""

    # --- what a contribution was made of ---------------------------------------------------------------

    def bounded(self, asked: Contribute, worker: str) -> Contribute:
        """A contribution from a worker's own seat, with samples and weight cut to what is plausible."""
        samples = asked.samples if self.plan.samples_per_batch is None else min(asked.samples, asked.batches * self.plan.samples_per_batch)
        weight, metrics = self._weight(asked.weight, samples), self.metrics(asked.metrics, worker)
        return asked._replace(samples=samples, weight=weight, metrics=metrics)

    def bounded_unit(self, asked: Delivered) -> Delivered:
        """A unit's result, with the samples of the unit and a plausible weight."""
        samples = self.samples_of(DataUnit(asked.epoch, asked.start, asked.batches))
        samples = asked.samples if samples is None else samples
        metrics = self.metrics(asked.metrics, asked.worker)
        return asked._replace(samples=samples, weight=self._weight(asked.weight, samples), metrics=metrics)

    def samples_of(self, unit: DataUnit) -> int | None:
        """Samples in a unit; None: the plan does not say how large batches are."""
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
        """Whether a worker can have come this far since its last contribution. `place`: None with a scheduler, which checks it itself."""
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

    def figures(self, reported: Mapping[str, float]) -> dict[str, float]:
        """The figures of a heartbeat that can be shown. They are replaced by the next heartbeat, so their names are not remembered."""
        if not reported:
            return {}
        return self._kept(reported, {name: value for name, value in reported.items() if _is_sane(value) and _PLAIN_NAME.fullmatch(name)})

    def metrics(self, reported: Mapping[str, float], worker: str) -> dict[str, float]:
        """The metrics of a contribution that go into the run's records."""
        return self._kept(reported, {name: value for name, value in reported.items() if _is_sane(value) and self._is_known(name, worker)})

    def _kept(self, reported: Mapping[str, float], kept: dict[str, float]) -> dict[str, float]:
        if len(kept) < len(reported):
            self.refused["figures"] = self.refused.get("figures", 0) + len(reported) - len(kept)
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
    return abs(value) <= LARGEST_FIGURE  # False for NaN
