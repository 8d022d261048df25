"""A relay's side of the protocol with the upstream coordinator, sans I/O: the relay is a worker whose engine is a coordinator.

The result of its round is sent upstream under the number in its journal; the reply contains the weights that its own workers continue with.
A relay that was killed between the two confirmations sends the same contribution again under the same number, and the upstream coordinator
accepts it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from shoal.config.schema.updates import Codec
from shoal.protocol.messages import Contribute, Frames
from shoal.updates import codecs
from shoal.worker.receipts import ReceiptsFile
from shoal.worker.session import ContributionReceipt, RunNews, SessionEvent, WorkerSession

_GONE = "overtaken"
"""Outcome of a contribution whose part of the data another worker has taken meanwhile."""


class UpstreamAnswer(NamedTuple):
    """The upstream coordinator's answer to a contribution."""

    status: str
    frames: Frames
    """Its newest weights, complete, followed by the statistics."""


class UpstreamSession:
    """Sends one contribution at a time upstream, and holds the upstream weights."""

    version = -1
    step = 0.0
    inner_steps = 0
    task: tuple[int, ...] = ()
    """In runs with a scheduler: epoch, first batch and end of what the relay has to do next."""

    def __init__(self, protocol: WorkerSession, size: int, buffers: int, receipts: ReceiptsFile, codec: Codec = codecs.PLAIN) -> None:
        """`buffers`: length of the statistics vector beside the weights; `codec`: the run's codec."""
        self.protocol, self.receipts, self.codec = protocol, receipts, codec
        self.weights = torch.zeros(size)
        self.statistics = torch.zeros(buffers)
        self._under_way = False
        self._status = ""

    def offer(self, asked: Contribute, frames: Frames) -> bool:
        """Queue a contribution from the journal. Returns whether it is new: then the caller starts the exchange."""
        if self._under_way:
            return False
        self.protocol.contribute_for_relay(asked, frames)
        self._under_way, self._status = True, ""
        return True

    def on_events(self, events: Iterable[SessionEvent]) -> UpstreamAnswer | None:
        """Process the events of an exchange; None: the contribution has no outcome yet."""
        for event in events:
            if isinstance(event, ContributionReceipt):
                self._status = event.status
                self.receipts.write(self.protocol.name, event)
            elif isinstance(event, RunNews):
                self._learn(event)
        if not self._under_way or self.protocol.pending is not None:
            return None
        self._under_way = False
        return UpstreamAnswer(self._status or _GONE, self.frames())

    def frames(self) -> list[memoryview]:
        """The upstream weights and statistics, encoded as in the journal."""
        vectors = [self.weights, self.statistics] if self.statistics.numel() else [self.weights]
        return [frame for vector in vectors for frame in codecs.encode(codecs.PLAIN, vector.clone(), None)]

    def _learn(self, news: RunNews) -> None:
        header, kind = news.header, news.header.get("weights", "same")
        self.step, self.inner_steps = float(header["step"]), int(header.get("inner_steps", self.inner_steps))
        if "until" in header:
            self.task = int(header["epoch"]), int(header["position"]), int(header["until"])
        if kind == "same":
            return
        extra = self.statistics.numel()
        codecs.renew(self.weights, kind, self.codec, news.frames[:-1] if extra else news.frames)
        if extra:
            codecs.decode(codecs.PLAIN, extra, news.frames[-1:], out=self.statistics)
        self.version = int(header["version"])
