"""Arguments of the coordinator's constructor: the run's plan, its limits, and the learner that holds the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shoal.config.schema.cluster import Host
from shoal.config.schema.updates import Updates
from shoal.coordinator.durable.contribution_files import ContributionFiles
from shoal.coordinator.units.cut import DataCut
from shoal.protocol.messages import Frames
from shoal.scheduling import Matching
from shoal.updates.episodes import EpisodeRows
from shoal.updates.experts import ExpertBlocks
from shoal.updates.fragments import Span

WAITING_SEAT = 0
"""Seat of a relay's worker that waits for its first piece of a task. The pieces' numbers begin after it."""


class Learner(Protocol):
    """Holds the weights and applies updates to them."""

    @property
    def vector(self) -> Tensor: ...
    @property
    def buffers(self) -> Tensor:
        """Buffers that are sent along with the weights."""

    @property
    def gradient_buffer(self) -> Tensor | None:
        """Where the mean of a round may be computed, so that `apply` need not copy it there; None: there is no such place."""

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        """Apply a share of the update at this step of the schedule. The update is read-only: it may lie in a frame."""


class RolloutLearner(Protocol):
    """Handler for contributions that are rollouts. A unit is given by the number of its first sample and its number of samples."""

    def lease(self, first: int, samples: int) -> dict[str, Any]:
        """Fields of a unit's lease."""

    def read(self, frames: Frames, first: int, samples: int, base: int, version: int, worker: str = "") -> tuple[Tensor, Tensor]:
        """Decode a unit's result, leased with version `base`. Raises UpdateError; InexactAnswers where it was not computed as it should
        have been. `worker`: its sender; empty: a record is replayed."""

    def learn(self, units: Sequence[tuple[int, int, Tensor, Tensor]], version: int) -> Mapping[str, float]:
        """Make the next version. Each unit: first sample, number of samples, and the two tensors that `read` returned."""


class ContributionScorer(ABC):
    """Measures weights on held-out data."""

    @abstractmethod
    def chooses(self) -> bool:
        """Whether to measure a round; at random, so that workers cannot know."""

    @abstractmethod
    def draw(self) -> list[int]:
        """Numbers of the held-out batches of a measurement, at random."""

    @abstractmethod
    def loss(self, weights: Tensor, buffers: Tensor, batches: Sequence[int]) -> float:
        """The mean loss of these held-out batches."""


class MemberLimits(NamedTuple):
    """Limits on workers."""

    joins_per_minute: int = 600
    """Workers that may join for the first time, per minute."""
    failures: int = 5
    """Units in a row that a worker may fail while others manage theirs."""
    quarantine_s: float = 600.0
    """How long such a worker is kept out."""
    devices: int = 64
    """Devices that one worker may have, each with its own batches."""
    sessions: int = 10_000
    """Workers at a time."""
    guests: Mapping[str, int] = MappingProxyType({})
    """Workers at a time on each person's invitation."""


class DataTask(NamedTuple):
    """A share of the data, for one worker at a time."""

    id: str
    first: int
    end: int
    """Its batches of an epoch: from `first` up to, not including, `end`."""
    work: float = 1.0
    """Work of one batch, in the units of the workers' speeds."""
    memory_gb: float = 0.0
    priority: float = 1.0


class TaskPlan(NamedTuple):
    """How the data is cut into tasks, and how they are matched with workers."""

    tasks: tuple[DataTask, ...]
    epochs: int | None
    """None: as many as the run needs."""
    grain: int
    """Batches per contribution. Tasks begin and end at multiples of it."""
    match: Matching
    claims: Mapping[str, Host]
    """By worker: its machine, as the configuration declares it."""
    megabits: float = 0.0
    """Traffic of a contribution, both ways."""
    interval_s: float = 0.0
    """Workers that join within this time are matched together."""
    workers: int = 0
    """Workers after which none is awaited; 0: unknown."""


class RelayPlace(NamedTuple):
    """A relay's seat at the coordinator above."""

    seat: int
    shards: int
    batches_per_shard: int | None
    """None: the data is a stream."""


class RunPlan(NamedTuple):
    """The facts about the run that the coordinator needs."""

    updates: Updates
    seed: int
    expected: int
    """Workers that the first round waits for."""
    needed: int
    """Contributions that the aggregation rule needs at least."""
    total_steps: int
    total_batches: int | None
    """Batches to learn from; None: the run ends after `total_steps`."""
    batches_per_step: int
    """Batches of an expected update: one step of the schedule."""
    heartbeat_interval_s: float
    telemetry_alpha: float
    cut: DataCut | None = None
    """How the data is cut into units; None: it is not leased."""
    lease_s: float = 0.0
    """How long a worker may hold a unit without a heartbeat."""
    attempts: int = 1
    """Failed attempts after which a unit is given up."""
    leased_elsewhere: bool = False
    """Whether a database keeps the leases."""
    worker_steps: int = 0
    """Inner steps of one worker in the whole run, where it takes several between contributions."""
    spans: tuple[Span, ...] = ()
    """Fragments of the weights that rounds move in turn; empty: every round moves all weights."""
    experts: ExpertBlocks | None = None
    """Positions of a mixture's experts; None: the model has none."""
    episodes: EpisodeRows | None = None
    """Positions of an episodic memory in the buffers; None: the model has none."""
    receipt_key: bytes = b""
    """Key of the receipts' seal (`receipt_seal.py`); empty: receipts have none."""
    owner_key: str = ""
    """Public key of the owner, for `owner_commands.py`; empty: commands are refused."""
    figures: tuple[str, ...] = ("loss",)
    """Metrics of the run's own task, which are always recorded."""
    samples_per_batch: int | None = None
    """None: the samples that workers report are not checked."""
    samples_per_epoch: int | None = None
    weight_per_sample: float = 1.0
    """Largest weight of a sample: its tokens, or 1."""
    batches_per_shard: int | None = None
    """None: the data is a stream."""
    bounds: MemberLimits = MemberLimits()
    tasks: TaskPlan | None = None
    """Tasks of a scheduler; None: the run has none."""
    listed: Mapping[str, str] = MappingProxyType({})
    """Workers that the configuration names, and their hosts, if it says so."""
    above: RelayPlace | None = None
    """For a relay: its seat at the coordinator above."""
    pull_every: int = 1
    """Steps of a worker between pulls."""
    most_lag: int | None = 0
    """Versions that may be made while a worker computes a unit; None: as many as the number of workers asks for."""
    scorer: ContributionScorer | None = None
    """Measures contributions; None: they all count."""
    rollouts: RolloutLearner | None = None
    """Handler for contributions that are rollouts; None in ordinary runs."""

    held_files: ContributionFiles | None = None
    """Where contributions wait as they were encoded; None: decoded in memory. Both give the same bits."""

    def data_seat(self, seat: int) -> int:
        """The seat among those of all relays: a relay's workers divide the data of its own seat."""
        if self.above is not None and self.tasks is not None:
            return max(WAITING_SEAT, seat)
        if self.above is None or seat < 0:
            return seat
        return self.above.seat * self.expected + seat % self.expected + seat // self.expected * self.above.shards * self.expected

    def span(self, number: int) -> Span | None:
        """The fragment of the weights that a round moves; None: all weights."""
        return self.spans[number % len(self.spans)] if self.spans else None
