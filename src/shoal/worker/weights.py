"""The weights of a worker: what the coordinator sent last, what the worker computes on, and the way from the one to the other."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config.schema.updates import Codec, NoCodec
from shoal.protocol.checksums import crc32
from shoal.protocol.frames import frame_of
from shoal.updates import codecs
from shoal.worker.policies import PullPolicy
from shoal.worker.session import RunNews
from shoal.worker.update_encoding import WorkerEngine

_PLAIN = NoCodec()
MOST_AHEAD = 3.0
"""Versions that a worker looks ahead. Further than that the way does not go on straight."""


class WorkerWeights:
    """An engine's weights, kept up to date with the coordinator's."""

    def __init__(self, engine: WorkerEngine, codec: Codec, pull: PullPolicy, *, own_steps: bool, alone: bool) -> None:
        """`own_steps`, `alone`: whether the worker steps its own weights, with every gradient or in long walks."""
        self.engine, self.codec, self.pull = engine, codec, pull
        self.version = -1
        self.lag = 0.0
        """Versions that others make between weights and the gradient that they lead to, as it was lately."""
        self._buffers = engine.buffers.numel()
        size, several = engine.vector.numel(), len(engine.layouts) > 1
        moved_by_others = not (own_steps or alone or pull.look_ahead) and pull.blend == 1
        in_place = engine.vector.device.type == "cpu" and engine.vector.dtype == torch.float32 and moved_by_others
        self.base = engine.vector if in_place else torch.empty(size)
        """The weights as the coordinator sent them; the engine's own vector where nothing else moves that."""
        self._before = torch.empty(size) if pull.look_ahead or (several and not alone) else None
        """The weights that it had before those."""

    def load(self, news: RunNews) -> bool:
        """Take what came with an answer; whether it was new."""
        kind = news.header.get("weights", "same")
        if kind == "same":
            return False
        span = slice(*news.header.get("span", (0, self.base.numel())))
        if self._before is not None:
            self._before.copy_(self.base)
        body = news.frames[:-1] if self._buffers else news.frames
        codecs.renew(self.base[span], kind, self.codec, body)
        if self._buffers:
            self.engine.load_buffers(codecs.decode(_PLAIN, self._buffers, news.frames[-1:]))
        before, self.version = -1 if news.afresh else self.version, news.header["version"]
        pulled = self.base[span]
        if self._before is not None and before >= 0:
            pulled = self._ahead(self._before, max(1, self.version - before))
        self._blend(1.0 if before < 0 else self.pull.blend, pulled, span)
        return True

    def checksum(self) -> int:
        """Of the coordinator's weights; -1 where a codec shortens them, so that two workers with the same version differ a little."""
        return crc32(frame_of(self.base.numpy())) if isinstance(codecs.of_weights(self.codec), NoCodec) else -1

    def go_back(self) -> None:
        """Back to the coordinator's weights: what was learned since was not taken."""
        self.engine.vector.copy_(self.base)
        self.engine.changed()

    def note_lag(self, versions: int) -> None:
        """Others made so many versions while the last contribution was computed and sent."""
        self.lag += 0.2 * (min(MOST_AHEAD, max(0, versions)) - self.lag)

    def _blend(self, share: float, pulled: Tensor, span: slice) -> None:
        """The worker's weights become the coordinator's, or a mixture of both."""
        vector = self.engine.vector
        if vector is not self.base:
            own = vector[span]
            own.copy_(pulled) if share == 1 else own.lerp_(pulled.to(own), share)
        self.engine.changed()

    def _ahead(self, before: Tensor, versions: int) -> Tensor:
        """Where the weights will be when the next gradient arrives, if they go on as they did lately."""
        if len(self.engine.layouts) > 1:
            self.engine.expect((self.base - before) / versions)
        ahead = min(self.lag, MOST_AHEAD) / versions if self.pull.look_ahead else 0.0
        return torch.lerp(before, self.base, 1 + ahead) if ahead > 0 else self.base
