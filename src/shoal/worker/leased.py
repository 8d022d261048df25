"""A worker that leases units: claim → gradient over the unit's batches → hand in, until there is no more work.

Nobody is waited for: what is handed in is safe, and the next unit is claimed at once. A unit whose weights have moved on meanwhile is
dropped, at the latest where it is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.config.schema.updates import NoCodec, Updates
from shoal.errors import ShoalError, out_of_memory
from shoal.tasks import Batch
from shoal.updates import codecs
from shoal.worker.interfaces import StepResult
from shoal.worker.member import Receipts
from shoal.worker.outgoing import Engine, Outgoing

_PLAIN = NoCodec()
_WAIT_S = 60.0


class Unit(Protocol):
    """A lease on some batches of an epoch."""

    @property
    def id(self) -> int: ...
    @property
    def iteration(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def batches(self) -> int: ...


class Weights(Protocol):
    """Weights that were published."""

    @property
    def version(self) -> int: ...
    @property
    def header(self) -> Mapping[str, Any]: ...
    @property
    def frames(self) -> Sequence[bytes | memoryview]: ...


class Learned(NamedTuple):
    """Figures of a unit."""

    metrics: dict[str, Tensor]
    weight: int
    samples: int


class Desk(Protocol):
    """Where units are leased and handed in."""

    def wanted(self, unit: Any) -> bool:
        """Whether the lease still holds, as far as one knows; it costs next to nothing to ask."""
        ...

    def claim(self, count: int, timeout_s: float) -> Sequence[Unit]: ...
    def weights(self, have: int) -> Weights | None: ...
    def submit(self, unit: Any, header: dict[str, Any], frames: Sequence[bytes | memoryview]) -> str: ...
    def give_back(self, unit: Any) -> None: ...
    def fail(self, unit: Any, reason: str) -> None: ...
    def leave(self) -> None: ...
    def wake(self) -> None: ...


class Leased:
    """A worker that has joined."""

    def __init__(
        self,
        name: str,
        desk: Desk,
        engine: Engine,
        read: Callable[[int, int, int], Iterator[Batch]],
        updates: Updates,
        *,
        tell: Callable[[str], None],
        receipts: Receipts | None = None,
        slowdown: float = 1.0,
    ) -> None:
        self.name, self.desk, self.engine, self.read, self.tell = name, desk, engine, read, tell
        self.slowdown = slowdown
        self.receipts = receipts or Receipts(None)
        self.updates, self.outgoing = updates, Outgoing(engine, updates)
        in_place = engine.vector.device.type == "cpu" and engine.vector.dtype == torch.float32
        self.base = engine.vector if in_place else torch.empty(engine.vector.numel())
        """The weights as they were read."""
        self.version = -1
        self.state = "starting"
        self.stopping = self.done = False
        self.counts = {"accepted": 0, "rejected": 0, "abandoned": 0}
        self.samples = 0
        """Of the units that were taken."""
        self.worked_s = self.idle_s = 0.0
        self._total = torch.zeros(engine.vector.numel())
        self._most: int | None = None
        """Samples that fit into memory at once; None: whole batches do."""

    # --- the work ----------------------------------------------------------------------------------

    def work(self) -> None:
        """Until the run is over, or somebody says stop."""
        self._refresh()
        while not (self.done or self.stopping):
            unit = self._next()
            if unit is None:
                self._refresh()
            else:
                self._do(unit)
        self.state = "leaving"
        self.desk.leave()
        self.receipts.close()

    def stop(self) -> None:
        """Leave soon; from any thread."""
        self.stopping = True
        self.desk.wake()

    @property
    def figures(self) -> dict[str, float]:
        """What a teacher wants to see of a worker."""
        whole = self.worked_s + self.idle_s
        return {
            "samples": self.samples,
            "samples_per_s": self.samples / whole if whole else 0.0,
            "idle_s": self.idle_s,
            "accepted": self.counts["accepted"],
            "rejected": self.counts["rejected"] + self.counts["abandoned"],
        }

    def _next(self) -> Unit | None:
        """One unit at a time: one that waits here would keep a round waiting."""
        self.state = "waiting"
        started = time.monotonic()
        units = self.desk.claim(1, _WAIT_S)
        self.idle_s += time.monotonic() - started
        return units[0] if units else None

    def _do(self, unit: Unit) -> None:
        """Learn from a unit, and hand in the result."""
        self._refresh()
        if unit.iteration != self.version or self.done:
            return self.desk.give_back(unit) if unit.iteration > self.version else None
        self.state = "computing"
        started = time.monotonic()
        result = self._learn(unit)
        if result is None:
            return None
        if not self.outgoing.limit(self._total):
            return self.desk.fail(unit, "the gradient is not finite")
        frames = self.outgoing.frames(self._total, result.samples)
        if self.slowdown > 1:
            time.sleep((self.slowdown - 1) * (time.monotonic() - started))
        metrics = {name: float(value) for name, value in result.metrics.items()}
        header = {"base": self.version, "weight": float(result.weight), "samples": result.samples, "metrics": metrics}
        self.state = "sending"
        status = self.desk.submit(unit, header, frames)
        self.worked_s += time.monotonic() - started
        self.receipts.write(self.name, unit.id, status, self.version)
        self.counts["accepted" if status == "accepted" else "rejected"] += 1
        if status == "accepted":
            self.samples += result.samples

    # --- learning ----------------------------------------------------------------------------------

    def _learn(self, unit: Unit) -> Learned | None:
        """The mean gradient over the unit is left in `_total`; None where the unit is not wanted any more."""
        self._total.zero_()
        metrics: dict[str, Tensor] = {}
        weight = samples = 0
        for batch in self.read(unit.epoch, unit.start, unit.batches):
            for result in self._in_parts(unit, batch):
                if self.stopping:
                    self.desk.give_back(unit)
                    return None
                if not self.desk.wanted(unit):
                    self.counts["abandoned"] += 1
                    return None
                self._total.lerp_(self.engine.gradient.float().cpu(), result.weight / max(1, weight + result.weight))
                for name, value in result.metrics.items():
                    metrics[name] = metrics.get(name, 0.0) + value * result.weight
                weight, samples = weight + result.weight, samples + result.samples
        return Learned({name: value / weight for name, value in metrics.items()}, weight, samples)

    def _in_parts(self, unit: Unit, batch: Batch) -> Iterator[StepResult]:
        """Gradients over a batch: of all of it, or of parts that fit into memory."""
        size, at = len(next(iter(batch.values()))), 0
        while at < size:
            most = min(self._most or size, size - at)
            part = batch if most == size else {name: value[at : at + most] for name, value in batch.items()}
            try:
                result = self.outgoing.gradients([part])
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self._shrink(unit, most)
                continue
            yield result
            at += most

    def _shrink(self, unit: Unit, most: int) -> None:
        if most == 1:
            self.desk.fail(unit, "out of memory with a single sample")
            raise ShoalError("there is not enough memory here for a single sample: close other programs, or use training.device=cpu")
        self._most = most // 2
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()
        self.tell(f"out of memory with {most} samples at once: going on with {self._most}")

    # --- weights -----------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Take the newest weights, if there are newer ones."""
        newer = self.desk.weights(self.version)
        if newer is None:
            return
        had, before = self.version, self.base.clone() if len(self.engine.layouts) > 1 and self.version >= 0 else None
        while newer is not None:
            self._take(newer)
            newer = self.desk.weights(self.version) if self.updates.codec.kind != "none" else None  # differences may follow
        if self.engine.vector is not self.base:
            self.engine.vector.copy_(self.base)
        self.engine.changed()
        if before is not None:
            self.engine.expect((self.base - before) / (self.version - had))

    def _take(self, newer: Weights) -> None:
        extra = self.engine.buffers.numel()
        body = newer.frames[:-1] if extra else newer.frames
        codecs.renew(self.base, newer.header["weights"], self.updates.codec, body)
        if extra:
            self.engine.load_buffers(codecs.decode(_PLAIN, extra, newer.frames[-1:]))
        self.version, self.done = newer.version, bool(newer.header["done"])
