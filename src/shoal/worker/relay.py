"""A relay's side of the conversation with the coordinator above, without the waiting: it is a worker whose engine is a coordinator.

What its round made goes up under the number that its journal has for it; the answer brings the weights that its own workers go on with.
A relay that was killed between the two confirmations says the same again under the same number, and the coordinator above takes it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from shoal.config.schema.updates import Codec, NoCodec
from shoal.protocol.messages import Contribute
from shoal.updates import codecs
from shoal.worker.receipts import ReceiptsFile
from shoal.worker.session import ContributionReceipt, Frames, RunNews, SessionEvent, WorkerSession

_PLAIN = NoCodec()
_GONE = "overtaken"
"""What became of a contribution whose place at the data another worker has taken meanwhile."""


class UpstreamAnswer(NamedTuple):
    """What the coordinator above said to a contribution."""

    status: str
    frames: Frames
    """Its newest weights, whole, and the statistics beside them."""


class UpstreamSession:
    """Passes on one contribution at a time, and knows the weights above."""

    version = -1
    step = 0.0
    inner_steps = 0

    def __init__(self, protocol: WorkerSession, size: int, buffers: int, receipts: ReceiptsFile, codec: Codec = _PLAIN) -> None:
        """`buffers`: numbers of the statistics beside the weights; `codec`: the run's."""
        self.protocol, self.receipts, self.codec = protocol, receipts, codec
        self.weights = torch.zeros(size)
        self.statistics = torch.zeros(buffers)
        self._under_way = False
        self._status = ""

    def offer(self, asked: Contribute, frames: Frames) -> bool:
        """Have a contribution said, which survives this process. Return whether it is new: then the conversation is to begin."""
        if self._under_way:
            return False
        self.protocol.contribute_for_relay(asked, frames)
        self._under_way, self._status = True, ""
        return True

    def hear(self, events: Iterable[SessionEvent]) -> UpstreamAnswer | None:
        """What came of a conversation; None: what was offered is not settled."""
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
        """The weights above, as they are written down."""
        vectors = [self.weights, self.statistics] if self.statistics.numel() else [self.weights]
        return [frame for vector in vectors for frame in codecs.encode(_PLAIN, vector.clone(), None)]

    def _learn(self, news: RunNews) -> None:
        header, kind = news.header, news.header.get("weights", "same")
        self.step, self.inner_steps = float(header["step"]), int(header.get("inner_steps", self.inner_steps))
        if kind == "same":
            return
        extra = self.statistics.numel()
        codecs.renew(self.weights, kind, self.codec, news.frames[:-1] if extra else news.frames)
        if extra:
            codecs.decode(_PLAIN, extra, news.frames[-1:], out=self.statistics)
        self.version = int(header["version"])
