"""State that survives a crash, and the records that change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from shoal.coordinator.effects import Frames
from shoal.coordinator.members.table import Member
from shoal.protocol.messages import Contribute, Delivered
from shoal.updates.expert_subsets import ExpertIds

Key = tuple[str, int]
"""A worker, and the number of one of its contributions."""


class TaskPiece(NamedTuple):
    """One epoch of a task, or a part of it."""

    task: int
    epoch: int
    first: int
    end: int
    holder: str = ""
    """The worker that was given it last."""


class HeldReply(NamedTuple):
    """The reply to an accepted contribution, held back until its worker may go on."""

    worker: Member
    caller: Any
    seq: int
    have: int
    round: int
    since: float
    repeated: bool = False


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


def unit_record(asked: Delivered, unit: int, share: float, number: int, experts: ExpertIds = ()) -> dict[str, Any]:
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


def accepted_record(
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
