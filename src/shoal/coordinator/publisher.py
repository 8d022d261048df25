"""Weights for those who ask: nothing new, the difference to what they have, or all of them; whichever is smaller.

For a worker that gets differences, a replica of what it has is kept, so what one difference lost is in the next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.config.schema.updates import Codec
from shoal.updates import codecs
from shoal.updates.fragments import Span
from shoal.updates.frames import frame_of

MOST_REPLICA_BYTES = 2 << 30
"""Memory for all replicas together; workers beyond it get full weights."""
_RETRY = 16
"""Pulls until changes are looked for again, after they were found to be everywhere."""
_ALL = "all"
"""Those who read the bulletin, as one worker: all read the same. No session is called that."""


class Publisher:
    """The newest weights, and who has which."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.version = -1
        self.span: Span | None = None
        """What changed with the newest version; None: everything may have."""
        self.vector = torch.empty(0)
        self.buffers = torch.empty(0)
        self._full: tuple[memoryview, ...] | None = None
        self._replicas: dict[str, tuple[int, Tensor]] = {}
        self._dense = 0

    def publish(self, version: int, vector: Tensor, buffers: Tensor, span: Span | None = None) -> None:
        """From now on these are the weights; since the version before only those in `span` have changed. They may change in place."""
        self.version, self.vector, self.buffers, self._full = version, vector, buffers, None
        self.span = span

    def since(self, session: str, have: int) -> tuple[dict[str, Any], tuple[memoryview, ...]]:
        """What a worker with version `have` needs to have this one."""
        if have == self.version:
            return {"weights": "same"}, ()
        known, replica = self._replicas.get(session, (have, None))
        if known != have:
            replica = None  # an answer was lost: what the worker has is not what is kept here
        span = self.span if have == self.version - 1 and known == have else None
        start, end = span or (0, self.vector.numel())
        fields = {} if span is None else {"span": [start, end]}
        if replica is not None and (difference := self._difference(replica[start:end], self.vector[start:end])) is not None:
            self._replicas[session] = (self.version, replica)
            kind, frames = difference
            return {"weights": kind} | fields, (*frames, *self._buffer_frame())
        if span is None:
            self._remember(session)
            return {"weights": "full"}, self.everything()
        if replica is not None:
            replica[start:end].copy_(self.vector[start:end])
            self._replicas[session] = (self.version, replica)
        return {"weights": "full"} | fields, (frame_of(self.vector[start:end].clone().numpy()), *self._buffer_frame())

    def forget(self, session: str) -> None:
        self._replicas.pop(session, None)

    def _difference(self, replica: Tensor, vector: Tensor) -> tuple[str, tuple[memoryview, ...]] | None:
        """The way from the replica to the weights, if it is shorter than all of them; the replica goes along."""
        codec = codecs.of_weights(self.codec)
        if self.codec.kind == "topk":
            changes = self._changes(replica, vector, codecs.encoded_bytes(codec, vector.numel()))
            if changes is not None:
                codecs.apply_changes(replica, changes)
                return "changes", changes
        if codec.kind == "none":
            return None
        frames = codecs.encode(codec, vector - replica, None)
        codecs.decode_into(codec, vector.numel(), frames, replica, 1.0, own=True)
        return "difference", frames

    def _changes(self, replica: Tensor, vector: Tensor, most: int) -> tuple[memoryview, ...] | None:
        """Where the replica is not to the bit what the weights are, if few are and it takes no more than so many bytes."""
        self._dense = max(0, self._dense - 1)
        changes = None if self._dense else codecs.encode_changes(replica, vector)
        if changes is None or sum(frame.nbytes for frame in changes) > most:
            self._dense = self._dense or _RETRY
            return None
        return changes

    def _remember(self, session: str) -> None:
        if self.codec.kind == "none":
            return
        there = self._replicas.get(session)
        size = self.vector.numel() * 4
        if there is not None:
            there[1].copy_(self.vector)
            self._replicas[session] = (self.version, there[1])
        elif (len(self._replicas) + 1) * size <= MOST_REPLICA_BYTES:
            self._replicas[session] = (self.version, self.vector.clone())

    def everything(self) -> tuple[memoryview, ...]:
        """A copy, made once a version: the transport may still be sending it when the weights move on."""
        if self._full is None:
            self._full = (frame_of(self.vector.clone().numpy()), *self._buffer_frame())
        return self._full

    def replica(self, session: str) -> tuple[memoryview, ...]:
        """All of the weights, as a worker has them that got differences."""
        return (frame_of(self._replicas[session][1].clone().numpy()), *self._buffer_frame())

    def _buffer_frame(self) -> tuple[memoryview, ...]:
        return (frame_of(self.buffers.clone().numpy()),) if self.buffers.numel() else ()


class Notice(NamedTuple):
    """Weights for all to read: `full`, or the `difference` to the version before."""

    kind: str
    header: dict[str, Any]
    frames: tuple[memoryview, ...]


class Bulletin:
    """The newest weights for workers that read them where they hang out, each when it likes: what changed, where a codec makes it shorter,
    and all of them as often as the changes since the last time add up to as much."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._have = self._newest = -1
        self._notices: list[Notice] = []
        self._bytes = 0
        """Of differences since the last full weights."""

    def notices(self) -> list[Notice]:
        """What to hang out for the newest version; the same when asked again."""
        version = self._publisher.version
        if self._newest == version:
            return self._notices
        if self._newest < 0:
            # The version that a coordinator begins with may be one that its predecessor hung out, not quite the same. Nothing builds on it.
            self._notices = [Notice("full", {"weights": "full"}, self._publisher.everything())]
        else:
            self._notices = self._news()
            self._have = version
        self._newest = version
        return self._notices

    def _news(self) -> list[Notice]:
        header, frames = self._publisher.since(_ALL, self._have)
        if header["weights"] == "full":
            self._bytes = 0
            return [Notice("full", header, frames)]
        difference = Notice("difference", header, frames)
        self._bytes += sum(frame.nbytes for frame in frames)
        if self._bytes < 4 * self._publisher.vector.numel():
            return [difference]
        self._bytes = 0
        return [Notice("full", {"weights": "full"}, self._publisher.replica(_ALL)), difference]
