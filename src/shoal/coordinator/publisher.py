"""Weights for those who ask: nothing new, the difference to what they have, or all of them; whichever is smaller.

For a worker that gets differences, a replica of what it has is kept, so what one difference lost is in the next.
"""

from __future__ import annotations

from typing import Any

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
        if self.codec.kind == "topk":
            self._dense = max(0, self._dense - 1)
            changes = None if self._dense else codecs.encode_changes(replica, vector)
            if changes is None:
                self._dense = self._dense or _RETRY
                return None
            codecs.apply_changes(replica, changes)
            return "changes", changes
        frames = codecs.encode(self.codec, vector - replica, None)
        codecs.decode_into(self.codec, vector.numel(), frames, replica, 1.0)
        return "difference", frames

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

    def _buffer_frame(self) -> tuple[memoryview, ...]:
        return (frame_of(self.buffers.clone().numpy()),) if self.buffers.numel() else ()
