"""The weights of a worker: those that the coordinator sent last, those that the worker computes on, and the update of the second from
the first."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.config.schema.updates import Codec, NoCodec
from shoal.protocol.checksums import crc32
from shoal.protocol.frames import frame_of
from shoal.updates import codecs
from shoal.updates.contribution_policy import ContributionPolicy
from shoal.worker.session import RunNews
from shoal.worker.step_policies import PullPolicy
from shoal.worker.update_encoding import WorkerEngine

MOST_AHEAD = 3.0
"""Versions that a worker extrapolates at most. Beyond that, linear extrapolation does not hold."""


class WorkerWeights:
    """An engine's weights, kept up to date with the coordinator's."""

    def __init__(self, engine: WorkerEngine, codec: Codec, pull: PullPolicy, contribution: ContributionPolicy) -> None:
        self.engine, self.codec, self.pull = engine, codec, pull
        self.version = -1
        self.lag = 0.0
        """Moving average of the versions made between a pull of weights and the arrival of the gradient computed on them."""
        self._buffers = engine.buffers.numel()
        size, several, alone = engine.vector.numel(), len(engine.layouts) > 1, contribution.takes_inner_steps
        moved_by_others = not (contribution.own_steps or alone or pull.look_ahead) and pull.blend == 1
        in_place = engine.vector.device.type == "cpu" and engine.vector.dtype == torch.float32 and moved_by_others
        self.base = engine.vector if in_place else torch.empty(size)
        """The weights as the coordinator sent them; the engine's own vector where nothing else moves that."""
        self._before = torch.empty(size) if pull.look_ahead or (several and not alone) else None
        """The weights of the version before `base`."""

    def load(self, news: RunNews) -> bool:
        """Load the weights of an answer. Returns whether they were new."""
        kind = news.header.get("weights", "same")
        if kind == "same":
            return False
        span = slice(*news.header.get("span", (0, self.base.numel())))
        if self._before is not None:
            self._before.copy_(self.base)
        body = news.frames[:-1] if self._buffers else news.frames
        codecs.renew(self.base[span], kind, self.codec, body)
        if self._buffers:
            self.engine.load_buffers(codecs.decode(codecs.PLAIN, self._buffers, news.frames[-1:]))
        before, self.version = -1 if news.afresh else self.version, news.header["version"]
        pulled = self.base[span]
        if self._before is not None and before >= 0:
            pulled = self._ahead(self._before, max(1, self.version - before))
        self._blend(1.0 if before < 0 else self.pull.blend, pulled, span)
        return True

    def checksum(self) -> int:
        """Checksum of the coordinator's weights; -1 if a codec compresses them, as two workers' weights then differ slightly."""
        return crc32(frame_of(self.base.numpy())) if isinstance(self.codec.for_weights(), NoCodec) else -1

    def go_back(self) -> None:
        """Reset to the coordinator's weights: the worker's own steps since then were not accepted."""
        self.engine.vector.copy_(self.base)
        self.engine.changed()

    def note_lag(self, versions: int) -> None:
        """Record how many versions were made while the last contribution was computed and sent."""
        self.lag += 0.2 * (min(MOST_AHEAD, max(0, versions)) - self.lag)

    def _blend(self, share: float, pulled: Tensor, span: slice) -> None:
        """Replace the worker's weights by the pulled ones, or mix both by `share`."""
        vector = self.engine.vector
        if vector is not self.base:
            own = vector[span]
            own.copy_(pulled) if share == 1 else own.lerp_(pulled.to(own), share)
        self.engine.changed()

    def _ahead(self, before: Tensor, versions: int) -> Tensor:
        """The weights extrapolated to the time when the next gradient arrives."""
        if len(self.engine.layouts) > 1:
            self.engine.expect((self.base - before) / versions)
        ahead = min(self.lag, MOST_AHEAD) / versions if self.pull.look_ahead else 0.0
        return torch.lerp(before, self.base, 1 + ahead) if ahead > 0 else self.base
