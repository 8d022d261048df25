"""A strategy's parts: six policies, and the length of its run. Users choose a strategy by name; they never assemble policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal.coordinator.round_policies import CoordinatorPolicies
from shoal.coordinator.units.cut import DataCut
from shoal.engines.learners.apply import ApplyPolicy, OptimizerStep
from shoal.updates.fragments import Span, spans
from shoal.updates.layout import ParameterLayout
from shoal.worker.producers import GradientContribution, WorkerContribution
from shoal.worker.step_policies import FeedPolicy, PullPolicy


class DataExtent(NamedTuple):
    """The size of the data and the number of workers that share it."""

    expected: int
    """Workers that the run is begun for."""
    ranks: int
    """Processes of a worker, each of which takes batches of its own."""
    batches_of_shard: Callable[[int], int | None]
    """Batches per epoch of one shard, by the number of shards that the data is cut into; None: a stream without end."""
    whole: bool = False
    """Whether the data is not cut into shards, and a scheduler assigns tasks of it; otherwise each worker has a shard."""

    @property
    def shards(self) -> int:
        return 1 if self.whole else self.expected


class RunLength(NamedTuple):
    """The length of a run."""

    steps: int
    """Updates of the weights."""
    batches: int | None
    """Batches to learn from; None: the run ends after `steps`."""
    batches_per_contribution: int
    batches_per_step: int
    batches_per_shard: int | None
    """Batches of an epoch that one worker has."""
    batches_per_epoch: int | None
    worker_steps: int
    """Steps of one worker, which its learning-rate schedule counts."""
    cut: DataCut | None = None
    """The division of the data into leased units."""
    samples_per_batch: int | None = None
    """Samples of a batch; None: `training.batch_size`."""


@dataclass(frozen=True, kw_only=True)
class Policies(CoordinatorPolicies):
    """How updates become new weights."""

    length: Callable[[DataExtent], RunLength]
    """How long the run is. Raises ShoalError where the settings and the data do not fit."""
    feed: FeedPolicy = FeedPolicy()  # noqa: RUF009 - frozen, like all policies
    """Where a worker's data comes from."""
    contribution: WorkerContribution = GradientContribution()  # noqa: RUF009
    """What a worker sends, and how often."""
    apply: ApplyPolicy = OptimizerStep()  # noqa: RUF009
    """How an update moves the weights."""
    pull: PullPolicy = PullPolicy()  # noqa: RUF009
    """When a worker takes new weights, and how."""
    expert_cap: float | None = None
    """Upper limit of a contribution's weight in an expert, as a multiple of that in the mean; None: tokens do not weigh experts."""

    def spans(self, layouts: Mapping[str, ParameterLayout]) -> tuple[Span, ...]:
        """The fragments of the weights that rounds update in turn; empty: each round updates all of them."""
        if self.contribution.fragments == 1:
            return ()
        return spans((slot.size for layout in layouts.values() for slot in layout.slots), self.contribution.fragments)
