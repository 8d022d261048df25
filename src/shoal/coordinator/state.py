"""What the coordinator is told beforehand, what it is asked, and what it knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shoal.config.schema.updates import Updates
from shoal.coordinator.effects import Frames
from shoal.coordinator.units.cut import DataCut
from shoal.protocol.messages import Asked, Contribute, Delivered, FromLeases
from shoal.scheduling import Matching
from shoal.updates.episodes import EpisodeRows
from shoal.updates.expert_subsets import ExpertIds
from shoal.updates.experts import ExpertBlocks
from shoal.updates.fragments import Span

Key = tuple[str, int]
"""A worker, and the number of one of its contributions."""


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


class TaskPiece(NamedTuple):
    """One epoch of a task, or a part of it."""

    task: int
    epoch: int
    first: int
    end: int
    holder: str = ""
    """The worker that was given it last."""


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
    intake: RolloutLearner | None = None
    """Where what workers send is no update of the weights."""

    def data_seat(self, seat: int) -> int:
        """The seat at the data of a whole tree: a relay's workers divide what its own seat has."""
        if self.above is None or seat < 0:
            return seat
        return self.above.seat * self.expected + seat % self.expected + seat // self.expected * self.above.shards * self.expected

    def span(self, number: int) -> Span | None:
        """The part of the weights that a round moves; None: all of them."""
        return self.spans[number % len(self.spans)] if self.spans else None


class RequestReceived(NamedTuple):
    """A worker asks something."""

    caller: Any
    """Whom to answer; only the transport knows what is in it."""
    asked: Asked
    frames: Frames = ()
    session: str = ""
    """A word that nobody can guess: for a worker that joins, what it has to sign, and then its session."""
    guest: str = ""
    """Whose invitation let the worker in; empty: the run's own token."""
    address: str = ""
    """Where the worker is, as far as the transport can tell."""


class LeaseResult(NamedTuple):
    """The database that keeps the leases passes on what came of a unit."""

    asked: FromLeases
    frames: Frames = ()
    more: bool = False
    """Whether other results follow at once: then no round closes before they are in it."""


class UnusableResult(NamedTuple):
    """What was handed in for a unit, at the database that keeps the leases, cannot be read."""

    epoch: int
    start: int
    reason: str


class WorkerExited(NamedTuple):
    """The launcher saw this worker's process exit. No round waits for the worker until it comes back."""

    name: str


class ServingStarted(NamedTuple):
    """The coordinator begins to serve, for the first time or after a break."""


class Interrupted(NamedTuple):
    """The run is to end before its time. Open rounds stay open, for a run that goes on later."""

    reason: str


class RunConcluded(NamedTuple):
    """The run is over: contributions in rounds that will not close are written off, by name."""


class Tick(NamedTuple):
    """Time has passed."""


class UpstreamState(NamedTuple):
    """What a relay was told by the coordinator that it is a worker of."""

    name: str
    """Its name there."""
    version: int
    """The version there that its weights are."""
    step: float
    inner_steps: int
    """Steps that a worker takes alone; 0: it takes none."""
    seq: int
    """The number of the relay's next contribution."""
    begun_at: int
    """Batches of the relay's seat that were learned from before this relay began."""


class UpstreamAnswered(NamedTuple):
    """A relay was sent new weights, in answer to what it passed on."""

    upstream: UpstreamState
    status: str
    """What became of its contribution."""
    frames: Frames
    """The new weights, whole, and the statistics beside them."""
    done: bool
    """Whether the run is over."""


Event = (
    RequestReceived | LeaseResult | UnusableResult | WorkerExited | ServingStarted | Interrupted | RunConcluded | Tick | UpstreamAnswered
)


class HeldReply(NamedTuple):
    """A worker whose answer is held back until a round has closed."""

    caller: Any
    seq: int
    have: int
    round: int
    since: float


@dataclass
class State:
    """What survives: a snapshot holds it, and records move it on."""

    version: int = 0
    batches: int = 0
    samples: int = 0
    sequences: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """By worker, of its newest contribution: what its receipt is sealed over."""
    """The last number taken from each worker."""
    positions: dict[str, list[int]] = field(default_factory=dict)
    """Epoch and batch at which each seat goes on."""
    seats: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """The key that each name belongs to. A name of a run from before there were keys belongs to the first that brings it."""
    made: dict[str, list[int]] = field(default_factory=dict)
    """Versions that a worker's own contributions went into since the weights it last pulled, where it steps its own weights."""
    contributions: dict[str, int] = field(default_factory=dict)
    """How many, by what became of them. Those that were turned away are no records: a crash forgets the ones since the last snapshot."""

    pieces: dict[int, TaskPiece] = field(default_factory=dict)
    """By seat: what is being done of the tasks, where a scheduler gives them out."""
    next_piece: int = 0
    epochs: int = 0
    """Epochs whose tasks are, or were, given out."""
    paused: bool = False
    """Whether the owner holds the run up: no round closes, and no unit is lent."""
    evicted: dict[str, str] = field(default_factory=dict)
    """Workers that the owner keeps out, by name, each with its key."""
    seen: dict[str, list[int]] = field(default_factory=dict)
    """Number, seat, epoch and batch that each worker was seen to send, where much of it was turned away since its last accepted one."""
    failures: dict[str, int] = field(default_factory=dict)
    """Units in a row that each worker could not do."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Workers that failed what others manage, and whose invitation each came on; the first to be let in again comes first."""
    upstream: dict[str, Any] = field(default_factory=dict)
    """What a relay was last told by the coordinator that it is a worker of (`UpstreamState`)."""

    def piece_is_done(self, number: int) -> bool:
        gone = self.positions.get(str(number))
        return gone is not None and gone[1] >= self.pieces[number].end

    def open_epoch(self, epoch: int, pieces: Sequence[Sequence[int]]) -> None:
        """Let the tasks of an epoch be given out. Pieces that are done are forgotten: there may be any number of epochs."""
        for number in [number for number in self.pieces if self.piece_is_done(number)]:
            del self.pieces[number], self.positions[str(number)]
        for task, first, end in pieces:
            self.add_piece(TaskPiece(task, epoch, first, end))
        self.epochs = epoch + 1

    def add_piece(self, piece: TaskPiece) -> None:
        self.pieces[self.next_piece] = piece
        self.next_piece += 1

    def cut_piece(self, number: int, at: int) -> None:
        """Let what a piece has from a batch on be a piece of its own."""
        piece = self.pieces[number]
        self.pieces[number] = piece._replace(end=at)
        self.add_piece(piece._replace(first=at, holder=""))

    def count(self, outcome: str) -> None:
        self.contributions[outcome] = self.contributions.get(outcome, 0) + 1


@dataclass
class HeldContribution:
    """A contribution that waits for its round to close."""

    record: dict[str, Any]
    frames: Frames
    vector: Tensor
    buffers: Tensor
    _line: list[Any] | None = None

    @property
    def line(self) -> list[Any]:
        """What the ledger will say of it. It is asked for twice, and made once."""
        if self._line is None:
            self._line = ledger_line(self.record)
        return self._line

    @property
    def key(self) -> Key:
        return key_of(self.record)

    @property
    def experts(self) -> ExpertIds:
        """The experts of a mixture that it is of; none: all of them."""
        return tuple(self.record.get("experts", ()))


_TOLD = itemgetter("worker", "seq", "base", "share", "samples", "seat", "epoch", "position", "batches")


def key_of(record: Mapping[str, Any]) -> Key:
    """What a round knows a contribution by: its worker, who may have several in it, and its number."""
    return record["worker"], record["seq"]


def former_key_of(record: Mapping[str, Any]) -> str:
    """What journals of earlier versions call a contribution in the record of a round that closed."""
    name: str = record["worker"]
    if record.get("late"):
        return f"{name} {record['seq']}"
    return f"{name} {record['unit']}" if "unit" in record else name


def delivered(asked: Delivered, unit: int, share: float, number: int, experts: ExpertIds = ()) -> dict[str, Any]:
    """The record of what was learned from a unit. All units are one seat's: each is done once, whichever worker does it."""
    return {
        "kind": "accepted",
        "unit": unit,
        "seat": 0,
        "share": share,
        "round": number,
        "position": asked.start + asked.batches,
        **({"experts": list(experts)} if experts else {}),
        **{name: getattr(asked, name) for name in ("worker", "seq", "base", "weight", "samples", "epoch", "batches")},
        "metrics": dict(asked.metrics),
    }


def accepted(
    worker: str, seat: int, asked: Contribute, share: float, number: int, late: bool = False, experts: ExpertIds = ()
) -> dict[str, Any]:
    """The record of a contribution."""
    return {
        "kind": "accepted",
        "worker": worker,
        "seat": seat,
        "share": share,
        "round": number,
        **({"late": True} if late else {}),
        **({"experts": list(experts)} if experts else {}),
        "seq": asked.seq,
        "base": asked.base,
        "weight": asked.weight,
        "samples": asked.samples,
        "epoch": asked.epoch,
        "position": asked.position,
        "batches": asked.batches,
        "metrics": dict(asked.metrics),
    }


def ledger_line(record: dict[str, Any]) -> list[Any]:
    """A contribution in the ledger: worker, number, base, share, samples, which batches of which seat, and the experts that it is of, where
    its worker does not hold all of them."""
    line = list(_TOLD(record))
    return [*line, list(record["experts"])] if record.get("experts") else line


def mean_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The weighted mean of each figure, over those who sent it."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for record in records:
        for name, value in record["metrics"].items():
            sums[name] = sums.get(name, 0.0) + record["weight"] * value
            weights[name] = weights.get(name, 0.0) + record["weight"]
    return {name: sums[name] / weights[name] for name in sums}
