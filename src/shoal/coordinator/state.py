"""State that survives a crash, and the records that change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from shoal.coordinator.members.table import Member
from shoal.protocol.messages import Contribute, Delivered, Frames
from shoal.updates.expert_subsets import ExpertIds

Key = tuple[str, int]
"""A worker's name, and the number of one of its contributions."""


class TaskPiece(NamedTuple):
    """One epoch of a task, or a part of it."""

    task: int
    epoch: int
    first: int
    end: int
    holder: str = ""
    """The worker that has or had it last."""


class HeldReply(NamedTuple):
    """The reply to an accepted contribution, held back until its worker may continue."""

    worker: Member
    caller: Any
    asked: Contribute
    since: float
    repeated: bool = False


@dataclass
class State:
    """State that snapshots hold and records change."""

    version: int = 0
    batches: int = 0
    samples: int = 0
    sequences: dict[str, int] = field(default_factory=dict)
    """By worker: number of its last accepted contribution."""
    digests: dict[str, str] = field(default_factory=dict)
    """By worker: digest of that contribution, which the seal of its receipt covers."""
    positions: dict[str, list[int]] = field(default_factory=dict)
    """By seat: epoch and batch of its next contribution."""
    seats: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """By name: the key that it belongs to."""
    made: dict[str, list[int]] = field(default_factory=dict)
    """By worker that steps its own weights: versions that its contributions went into since its last pull."""
    contributions: dict[str, int] = field(default_factory=dict)
    """Contributions by outcome. Rejections are no records: a crash forgets those since the last snapshot."""

    pieces: dict[int, TaskPiece] = field(default_factory=dict)
    """By seat: the pieces of tasks that are being done, in runs with a scheduler."""
    next_piece: int = 0
    epochs: int = 0
    """Epochs whose tasks can be, or were, assigned."""
    paused: bool = False
    """Whether the owner paused the run: no round closes, and no unit is leased."""
    evicted: dict[str, str] = field(default_factory=dict)
    """By name: key of a worker that the owner keeps out."""
    seen: dict[str, list[int]] = field(default_factory=dict)
    """By worker with many rejections since its last accepted contribution: number, seat, epoch and batch of the last one."""
    failures: dict[str, int] = field(default_factory=dict)
    """By worker: units in a row that it failed."""
    accepted: dict[str, int] = field(default_factory=dict)
    """By worker: how many of its contributions were accepted, in all its sessions."""
    away: dict[str, str] = field(default_factory=dict)
    """By worker that left for a while: why, as it said. The newest is the last one."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """By worker in quarantine: the person on whose invitation it joined. The first to be let in again comes first."""
    scores: dict[str, list[float]] = field(default_factory=dict)
    """By worker: its score and the number of its measurements (`updates/rules/scores.py`)."""
    upstream: dict[str, Any] = field(default_factory=dict)
    """Fields of a relay's `UpstreamState`."""

    def piece_is_done(self, number: int) -> bool:
        gone = self.positions.get(str(number))
        return gone is not None and gone[1] >= self.pieces[number].end

    def open_epoch(self, epoch: int, pieces: Sequence[Sequence[int]]) -> None:
        """Add the pieces of an epoch. Pieces that are done are forgotten: the number of epochs is unbounded."""
        for number in [number for number in self.pieces if self.piece_is_done(number)]:
            del self.pieces[number], self.positions[str(number)]
        for task, first, end in pieces:
            self.add_piece(TaskPiece(task, epoch, first, end))
        self.epochs = epoch + 1

    def add_piece(self, piece: TaskPiece) -> None:
        self.pieces[self.next_piece] = piece
        self.next_piece += 1

    def forget_pieces(self) -> None:
        """Forget all pieces: a relay's round has them all, and the coordinator above has answered it."""
        self.pieces.clear()
        self.positions.clear()

    def cut_piece(self, number: int, at: int) -> None:
        """Split a piece before the batch `at`."""
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

    @cached_property
    def line(self) -> list[Any]:
        """Its values in the ledger, cached as they are needed twice."""
        return ledger_line(self.record)

    @property
    def key(self) -> Key:
        return key_of(self.record)

    @property
    def experts(self) -> ExpertIds:
        """Experts of a mixture that it holds; empty: all of them."""
        return tuple(self.record.get("experts", ()))


_LEDGER_FIELDS = itemgetter("worker", "seq", "base", "share", "samples", "seat", "epoch", "position", "batches")


def key_of(record: Mapping[str, Any]) -> Key:
    """The key of a contribution in its round, which may hold several of one worker."""
    return record["worker"], record["seq"]


def accepted_record(
    asked: Contribute | Delivered, worker: str, seat: int, position: int, share: float, number: int, experts: ExpertIds = ()
) -> dict[str, Any]:
    """The record of an accepted contribution to round `number`. `position`: the batch of the epoch that its seat has reached."""
    claimed = {name: getattr(asked, name) for name in ("seq", "base", "weight", "samples", "epoch", "batches")}
    record = {"kind": "accepted", "worker": worker, "seat": seat, "share": share, "round": number, "position": position, **claimed}
    return record | {"metrics": dict(asked.metrics)} | ({"experts": list(experts)} if experts else {})


def ledger_line(record: dict[str, Any]) -> list[Any]:
    """Its values in the ledger: worker, number, base, share, samples, seat, epoch, position, batches; experts, if it has not all."""
    line = list(_LEDGER_FIELDS(record))
    return [*line, list(record["experts"])] if record.get("experts") else line


def mean_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The weighted mean of each metric, over the records that have it."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for record in records:
        for name, value in record["metrics"].items():
            sums[name] = sums.get(name, 0.0) + record["weight"] * value
            weights[name] = weights.get(name, 0.0) + record["weight"]
    return {name: sums[name] / weights[name] for name in sums}
