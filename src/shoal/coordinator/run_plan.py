"""What the coordinator is given when it is built: the run's plan, its limits, and the learner that holds the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shoal.config.schema.updates import Updates
from shoal.coordinator.effects import Frames
from shoal.coordinator.units.cut import DataCut
from shoal.scheduling import Matching
from shoal.updates.episodes import EpisodeRows
from shoal.updates.experts import ExpertBlocks
from shoal.updates.fragments import Span


class Learner(Protocol):
    """The weights, and what moves them."""

    @property
    def vector(self) -> Tensor: ...
    @property
    def buffers(self) -> Tensor:
        """Statistics that travel beside the weights."""
        ...

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        """Move the weights by a share of the update, as at this step of the schedule. It is for reading: it may lie in a frame."""
        ...


class RolloutLearner(Protocol):
    """What workers send, where that is no update of the weights: what can be used of it, and how the weights move by it.

    A unit is named by the number of its first sample and by how many there are.
    """

    def lease(self, first: int, samples: int) -> dict[str, Any]:
        """What a worker is told with a unit."""
        ...

    def read(self, frames: Frames, first: int, samples: int, base: int, version: int, worker: str = "") -> tuple[Tensor, Tensor]:
        """What came of a unit that was leased with the version `base`. Raises UpdateError, and InexactAnswers where it was not computed as
        it should have been. `worker`: who sent it now; empty: it was taken before, and is read again."""
        ...

    def learn(self, units: Sequence[tuple[int, int, Tensor, Tensor]], version: int) -> Mapping[str, float]:
        """Make the next version. Each unit: its first sample, how many, and what `read` gave for it."""
        ...


class MemberLimits(NamedTuple):
    """What workers may ask of the coordinator."""

    joins_per_minute: int = 600
    """Workers that may come for the first time."""
    failures: int = 5
    """Units in a row that a worker may fail while others manage theirs."""
    quarantine_s: float = 600.0
    """How long it is then kept out."""
    devices: int = 64
    """Devices that a worker may be made of. Each takes batches of its own, and counts."""
    sessions: int = 10_000
    """Workers that may be here at a time."""
    guests: Mapping[str, int] = MappingProxyType({})
    """Workers that may be here at a time on the invitation of each person."""


class DataTask(NamedTuple):
    """A share of the data, for one worker at a time."""

    id: str
    first: int
    end: int
    """The batches of an epoch that it has, from the first up to, not including, the end."""
    work: float = 1.0
    """What a batch of it takes, in the units of the workers' speeds."""
    memory_gb: float = 0.0
    priority: float = 1.0


class DeclaredResources(NamedTuple):
    """What the settings say of a worker."""

    speed: float | None = None
    memory_gb: float | None = None
    bandwidth_mbps: float | None = None


class TaskPlan(NamedTuple):
    """How the data is cut into tasks, and who may have them."""

    tasks: tuple[DataTask, ...]
    epochs: int | None
    """None: as many as it takes."""
    grain: int
    """Batches of a contribution. Tasks begin and end at multiples of it."""
    match: Matching
    claims: Mapping[str, DeclaredResources]
    megabits: float = 0.0
    """What travels for a contribution, both ways."""


class RelayPlace(NamedTuple):
    """Where a relay stands at the coordinator that it is a worker of."""

    seat: int
    shards: int
    batches_per_shard: int | None
    """None: the data is a stream."""


class RunPlan(NamedTuple):
    """The run, as far as the coordinator must know it."""

    updates: Updates
    seed: int
    expected: int
    """Workers that the first round waits for."""
    needed: int
    """Contributions without which the aggregation rule cannot work."""
    total_steps: int
    total_batches: int | None
    """Batches to learn from; None: the steps count."""
    batches_per_step: int
    """Batches that an update is expected to be made of; it is what one step of the schedule is worth."""
    heartbeat_interval_s: float
    telemetry_alpha: float
    cut: DataCut | None = None
    """How the data is cut into units, where they are leased."""
    lease_s: float = 0.0
    """How long a worker may take for a unit without a sign of life before others may have it."""
    attempts: int = 1
    """How often a unit is tried before it is given up."""
    leased_elsewhere: bool = False
    """Whether a database keeps the leases, and the coordinator hears of their results."""
    worker_steps: int = 0
    """Steps of one worker in the whole run, where it takes many alone between contributions."""
    spans: tuple[Span, ...] = ()
    """The parts of the weights that rounds take in turn; none: every round moves all of them."""
    experts: ExpertBlocks | None = None
    """Where the experts of a mixture lie; None: the model is none."""
    episodes: EpisodeRows | None = None
    """Where the episodes of a memory lie in what workers tell beside their updates; None: there is no memory."""
    receipt_key: bytes = b""
    """What receipts are sealed with (`seals.py`); empty: they are not."""
    owner_key: str = ""
    """The public half of the owner's key: orders that it proves are obeyed. Empty: nobody gives orders here."""
    figures: tuple[str, ...] = ("loss",)
    """Names of figures that the run's own task tells: these are recorded whatever else workers tell."""
    samples_per_batch: int | None = None
    """None: what workers say of their samples is not checked."""
    samples_per_epoch: int | None = None
    weight_per_sample: float = 1.0
    """What a sample can count at most: its tokens, or 1."""
    batches_per_shard: int | None = None
    """None: the data is a stream."""
    bounds: MemberLimits = MemberLimits()
    tasks: TaskPlan | None = None
    """How the data is cut into tasks, where a scheduler gives them out."""
    listed: Mapping[str, str] = MappingProxyType({})
    """Workers that the settings name, and where they are, as far as the settings say it."""
    above: RelayPlace | None = None
    """For a relay: its place at the coordinator that it is a worker of."""
    most_lag: int = 0
    """Versions that may be made while a worker has a unit."""
    rollouts: RolloutLearner | None = None
    """Where what workers send is no update of the weights."""

    def data_seat(self, seat: int) -> int:
        """The seat at the data of a whole tree: a relay's workers divide what its own seat has."""
        if self.above is None or seat < 0:
            return seat
        return self.above.seat * self.expected + seat % self.expected + seat // self.expected * self.above.shards * self.expected

    def span(self, number: int) -> Span | None:
        """The part of the weights that a round moves; None: all of them."""
        return self.spans[number % len(self.spans)] if self.spans else None
