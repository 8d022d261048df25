"""Weights for workers: nothing, the difference to what they have, or all weights, whichever is smallest.

For workers that get differences, a replica of their weights is kept, so that what one difference lost is in the next. Workers that were
sent the same weights share a replica, and a difference is computed once for all of them. What a replica lacks is in no snapshot: a
coordinator that restarts sends each worker full weights once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.config.schema.updates import Codec
from shoal.protocol.buffer_pool import take_buffer
from shoal.protocol.frames import Frames, frame_of
from shoal.updates import codecs
from shoal.updates.expert_subsets import ExpertIds, part_of
from shoal.updates.experts import ExpertBlocks
from shoal.updates.fragments import Span

MOST_REPLICA_BYTES = 2 << 30
"""Memory for all replicas, besides one while workers move from one version to the next. Workers beyond it get full weights."""
MOST_SETS = 64
"""Different sets of experts that workers may hold at a time."""
_RETRY = 16
"""Pulls without a search for sparse changes, after the changes were found to be dense."""
_ALL = "all"
"""Session of all readers of the `WeightsFeed`, which read the same. No worker's session has this name."""


class Replica:
    """Weights that some workers have."""

    def __init__(self, vector: Tensor, fixed: bool) -> None:
        self.vector, self.fixed, self.holders = vector, fixed, 0
        """Fixed: its memory is being sent, and must not change."""


class ReplicaUpdate(NamedTuple):
    """How a replica becomes the newest weights, or those in a span."""

    kind: str
    frames: Frames
    span: Span | None
    end: Replica | None
    """The replica of workers that applied it; None: none is kept."""


class WeightsPublisher:
    """The newest weights, and replicas of what workers have."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.most_bytes = MOST_REPLICA_BYTES
        self.version = -1
        self.span: Span | None = None
        """The span that changed with the newest version; None: everything may have."""
        self.vector = torch.empty(0)
        self.buffers = torch.empty(0)
        self._held: dict[str, tuple[int, Replica]] = {}
        self._kept = 0
        """Number of different replicas in use, needed at every pull."""
        self._updates: dict[tuple[Replica | None, Span | None], ReplicaUpdate] = {}
        self._copies: dict[Replica, Frames] = {}
        self._dense = 0

    def publish(self, version: int, vector: Tensor, buffers: Tensor, span: Span | None = None) -> None:
        """Set the newest weights; since the version before only those in `span` have changed. The tensor may change in place."""
        self.version, self.vector, self.buffers, self.span = version, vector, buffers, span
        self._updates.clear()
        self._copies.clear()

    def since(self, session: str, have: int) -> tuple[dict[str, Any], Frames]:
        """Header fields and frames that update a worker from version `have` to the newest one."""
        if have == self.version:
            return {"weights": "same"}, ()
        known, replica = self._held.get(session, (have, None))
        if known != have:  # a reply was lost: the replica is not what the worker has
            self.forget(session)
            replica = None
        anew = known != have or (replica is None and self._has_room())
        self._dense = max(0, self._dense - 1)
        shared = self._shared() if replica is None else None
        update = self._update(replica, None if anew or have != self.version - 1 else self.span) if shared is None else self._copy(shared)
        self.forget(session)
        if update.end is not None:
            self._kept += update.end.holders == 0
            update.end.holders += 1
            self._held[session] = (self.version, update.end)
        fields = {} if update.span is None else {"span": [*update.span]}
        return {"weights": update.kind} | fields, (*update.frames, *self._buffer_frame())

    def forget(self, session: str) -> None:
        if (held := self._held.pop(session, None)) is not None:
            held[1].holders -= 1
            self._kept -= held[1].holders == 0

    def everything(self) -> Frames:
        """All weights, copied once per version: the transport may still be sending them when the weights change."""
        return (*self._update(None, None).frames, *self._buffer_frame())

    def replica(self, session: str) -> Frames:
        """All weights, as a worker has them that applied the differences."""
        return (frame_of(self._held[session][1].vector.clone().numpy()), *self._buffer_frame())

    def _update(self, replica: Replica | None, span: Span | None) -> ReplicaUpdate:
        """Computed once for all workers that have the same weights."""
        if (replica, span) not in self._updates:
            self._updates[replica, span] = self._compute(replica, span)
        return self._updates[replica, span]

    def _shared(self) -> Replica | None:
        """The replica of the newest version that most workers have, where differences are sparse, and so leave out much for a while.

        A worker that joins gets it: another replica would stay another one, and cost another difference for each version."""
        if not self.codec.for_weights().sparse or (None, None) in self._updates:
            return None
        newest = [replica for version, replica in self._held.values() if version == self.version]
        return max(newest, key=lambda replica: replica.holders, default=None)

    def _copy(self, replica: Replica) -> ReplicaUpdate:
        """All weights as in a replica, copied once for a version: the replica may move while the transport is sending."""
        if replica not in self._copies:
            self._copies[replica] = (frame_of(replica.vector.clone().numpy()),)
        return ReplicaUpdate("full", self._copies[replica], None, replica)

    def _compute(self, replica: Replica | None, span: Span | None) -> ReplicaUpdate:
        start, end = span or (0, self.vector.numel())
        target = self.vector[start:end]
        shorter = None if replica is None else self._shorter(replica.vector[start:end], target)
        if shorter is None and span is None:
            if replica is not None:
                return self._update(None, None)
            copy = _copied(self.vector)
            return ReplicaUpdate("full", (frame_of(copy.numpy()),), None, Replica(copy, fixed=True) if self._has_room() else None)
        kind, frames = shorter or ("full", (frame_of(target.clone().numpy()),))
        moved = None if replica is None else self._movable(replica)
        if moved is not None:
            codecs.renew(moved.vector[start:end], kind, self.codec, frames, own=True)
        return ReplicaUpdate(kind, frames, span, moved)

    def _movable(self, replica: Replica) -> Replica | None:
        """A copy of a replica, or the replica itself where no other worker has it; None where the memory is full."""
        if replica.holders == 1 and not replica.fixed:
            return replica
        return Replica(replica.vector.clone(), fixed=False) if self._has_room() else None

    def _shorter(self, replica: Tensor, vector: Tensor) -> tuple[str, Frames] | None:
        """The encoded difference from the replica to the weights; None: full weights are smaller."""
        codec = self.codec.for_weights()
        if self.codec.kind == "topk":
            changes = self._changes(replica, vector, codecs.encoded_bytes(codec, vector.numel()))
            if changes is not None:
                return "changes", changes
        if codec.kind == "none":
            return None
        return "difference", codecs.encode(codec, vector - replica, None)

    def _changes(self, replica: Tensor, vector: Tensor, most: int) -> Frames | None:
        """The exact changes from the replica to the weights; None: they take more than `most` bytes."""
        changes = None if self._dense else codecs.encode_changes(replica, vector)
        if changes is None or sum(frame.nbytes for frame in changes) > most:
            self._dense = self._dense or _RETRY
            return None
        return changes

    def _has_room(self) -> bool:
        """Whether there is memory for one more replica."""
        return self.codec.kind != "none" and max(self._kept, 1) * 4 * self.vector.numel() <= self.most_bytes

    def _buffer_frame(self) -> Frames:
        return (frame_of(self.buffers.clone().numpy()),) if self.buffers.numel() else ()


def _copied(vector: Tensor) -> Tensor:
    """A copy in pooled memory: clearing fresh pages takes the system longer than copying."""
    return torch.frombuffer(take_buffer(4 * vector.numel()), dtype=torch.float32).copy_(vector) if vector.numel() else vector.clone()


class SubsetPublisher:
    """Weights for workers that hold some of a mixture's experts: one publisher for each set of experts in use."""

    def __init__(self, whole: WeightsPublisher, blocks: ExpertBlocks | None) -> None:
        self._whole, self._blocks = whole, blocks
        self._publishers: dict[ExpertIds, WeightsPublisher] = {}
        self._sessions: dict[str, ExpertIds] = {}

    def has_room_for(self, experts: ExpertIds) -> bool:
        """Whether this set of experts can be held: each set is a copy of a part of the weights, so their number is bounded."""
        return experts in self._publishers or len(self._publishers) < MOST_SETS

    def hold(self, session: str, experts: ExpertIds) -> None:
        """Send only these experts to a worker from now on."""
        self._sessions[session] = experts
        self._publishers.setdefault(experts, WeightsPublisher(self._whole.codec))
        self._share_memory()

    def since(self, session: str, have: int) -> tuple[dict[str, Any], Frames]:
        """As `WeightsPublisher.since`, for the worker's experts and the trunk, or for all weights."""
        experts = self._sessions.get(session)
        if experts is None or self._blocks is None:
            return self._whole.since(session, have)
        own, whole = self._publishers[experts], self._whole
        if own.version != whole.version:
            own.publish(whole.version, part_of(self._blocks, whole.vector, experts), whole.buffers)
        return own.since(session, have)

    def forget(self, session: str) -> None:
        self._whole.forget(session)
        experts = self._sessions.pop(session, None)
        if experts is None:
            return
        self._publishers[experts].forget(session)
        if experts not in self._sessions.values():
            del self._publishers[experts]
            self._share_memory()

    def _share_memory(self) -> None:
        for one in self._publishers.values():
            one.most_bytes = MOST_REPLICA_BYTES // len(self._publishers)


class WeightsMessage(NamedTuple):
    """Weights for all readers: `full`, or the `difference` to the version before."""

    kind: str
    header: dict[str, Any]
    frames: Frames


class WeightsFeed:
    """The newest weights for readers of a database: differences, and full weights whenever the differences add up to their size."""

    def __init__(self, publisher: WeightsPublisher) -> None:
        self._publisher = publisher
        self._have = self._newest = -1
        self._messages: list[WeightsMessage] = []
        self._bytes = 0
        """Bytes of differences since the last full weights."""

    def messages(self) -> list[WeightsMessage]:
        """The messages for the newest version, computed once."""
        version = self._publisher.version
        if self._newest == version:
            return self._messages
        if self._newest < 0:
            # Before a restart this version may have been published with slightly different weights: no difference builds on it.
            self._messages = [WeightsMessage("full", {"weights": "full"}, self._publisher.everything())]
        else:
            self._messages = self._next()
            self._have = version
        self._newest = version
        return self._messages

    def _next(self) -> list[WeightsMessage]:
        header, frames = self._publisher.since(_ALL, self._have)
        if header["weights"] == "full":
            self._bytes = 0
            return [WeightsMessage("full", header, frames)]
        difference = WeightsMessage("difference", header, frames)
        self._bytes += sum(frame.nbytes for frame in frames)
        if self._bytes < 4 * self._publisher.vector.numel():
            return [difference]
        self._bytes = 0
        return [WeightsMessage("full", {"weights": "full"}, self._publisher.replica(_ALL)), difference]
