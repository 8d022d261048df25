"""The updates that virtual workers send.

`TimedUpdates` simulates only times, bytes and decisions, for any number of workers and any size of model: every worker sends one of a few
updates that were encoded once. `LearnedUpdates` gives every worker its own engine and the real producers, so that the run really learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.config.schema.updates import Updates
from shoal.protocol.messages import Contribute, Frames, SeatAssigned
from shoal.runs.build_run import RunParts, feed_for_seat
from shoal.runs.live_objects import NO_LIVE_OBJECTS, players_for, task_for
from shoal.runs.worker_run import unit_pieces
from shoal.simulate.batched_workers import BatchedEngine, BatchedSteps, PrefetchedFeed
from shoal.strategies import Policies
from shoal.updates import codecs
from shoal.updates.fragments import Span
from shoal.updates.worker_state import NoWorkerCheckpoint
from shoal.worker.session import LeasedUnit, RunNews
from shoal.worker.update_encoding import UpdateEncoder, WorkerEngine
from shoal.worker.weights import WorkerWeights

STAND_IN = 10_000
"""Largest number of values in a simulated update; the links count the bytes of the real model."""
_POOL = 16
"""Number of different simulated updates."""
_FALSE = -10.0
"""Factor of a false worker's updates."""


EncodedUpdate = tuple[Contribute, Frames]
"""An update as it is sent. The session adds its numbers."""


class PlainDescent:
    """The simplest learner: plain gradient descent."""

    gradient_buffer = None

    def __init__(self, size: int) -> None:
        self.vector, self.buffers = torch.zeros(size), torch.empty(0)

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        self.vector.add_(update, alpha=-0.001 * share)
        return {}


class TimedUpdates:
    """A few updates that are encoded once and sent by all workers."""

    def __init__(self, policies: Policies, updates: Updates, size: int, samples_per_batch: int, batches: int, shard: int | None) -> None:
        """`size`: parameters of the real model; `batches`: per step; `shard`: batches of a worker's shard per epoch, None for a stream."""
        self.policies, self.samples_per_batch, self.batches, self.shard = policies, samples_per_batch, batches, shard
        self.size = min(size, STAND_IN)
        self.scale = size / self.size
        generator = torch.Generator().manual_seed(0)
        vectors = [torch.randn(self.size, generator=generator) * 0.01 for _ in range(_POOL)]
        self.honest = [codecs.encode(updates.codec, vector, None) for vector in vectors]
        self.false = [codecs.encode(updates.codec, _FALSE * vector, None) for vector in vectors]
        self.update_bytes = self.scale * sum(map(len, self.honest[0]))

    def source(self, false: bool) -> _TimedWorker:
        return _TimedWorker(self, false)


class _TimedWorker:
    """Position in the data, and inner steps of a contribution."""

    def __init__(self, common: TimedUpdates, false: bool) -> None:
        self.common, self._frames = common, common.false if false else common.honest
        contribution = common.policies.contribution
        self.sync_delay = contribution.sync_delay
        self._steps, self._made = contribution.inner_steps, 0
        self._epoch = self._position = 0

    def take_seat(self, seat: int, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position

    def position(self) -> tuple[int, int]:
        return self._epoch, self._position

    def begin(self) -> int:
        """Begin an update; returns the batches that it takes."""
        return self._steps * self.common.batches

    def make(self, have: int, unit: LeasedUnit | None) -> EncodedUpdate:
        common, self._made = self.common, self._made + 1
        batches, number = (self._steps * common.batches, -1) if unit is None else (unit.batches, unit.number)
        self._advance(batches, unit)
        samples = batches * common.samples_per_batch
        update = Contribute("", 0, 0, have, 0, float(samples), samples, *self.position(), batches, -1, {}, number)
        return update, self._frames[self._made % _POOL]

    def _advance(self, batches: int, unit: LeasedUnit | None) -> None:
        shard = self.common.shard
        if unit is not None:
            self._epoch, self._position = unit.epoch, unit.start + unit.batches
        elif shard is None:
            self._position += batches
        else:
            total = self._epoch * shard + self._position + batches
            self._epoch = (total - 1) // shard
            self._position = total - self._epoch * shard

    def on_answer(self, news: RunNews, status: str | None) -> None:
        self._steps = news.header.get("inner_steps", self._steps)


class LearnedUpdates:
    """Real updates: each worker has its own engine and the real producer, on the same data."""

    scale, update_bytes = 1.0, 0.0

    def __init__(self, parts: RunParts, policies: Policies, shards: int, spans: tuple[Span, ...]) -> None:
        self.parts, self.policies, self.shards, self.spans = parts, policies, shards, spans
        self.units = unit_pieces(parts, policies) if policies.feed.leased else None
        self.batched_steps = BatchedSteps(parts.run, self.engine(), parts.data.info.vocab_size or 0, policies.feed.leased)

    def engine(self) -> BatchedEngine:
        run, samples = self.parts.run, self.parts.data
        task = task_for(run, NO_LIVE_OBJECTS, players_for(run, NO_LIVE_OBJECTS, samples.info), samples.info)
        return BatchedEngine(run, task, self.parts.single.total_steps)

    def source(self, false: bool) -> _LearningWorker:
        return _LearningWorker(self, false)

    def feed(self, seat: int, epoch: int, position: int) -> Any:
        if self.units is not None:
            return self.units.at(epoch, position)
        feed = feed_for_seat(self.parts.run, self.parts.data, seat, self.shards)
        feed.load_state_dict(feed.state_dict() | {"epoch": epoch, "position": position})
        return feed


class _LearningWorker:
    """The producer's context for one virtual worker; nothing here waits."""

    ranks, over, stopping = 1, False, False

    def __init__(self, common: LearnedUpdates, false: bool) -> None:
        run, policies = common.parts.run, common.policies
        self.common, self.false, self.accumulation = common, false, run.training.gradient_accumulation_steps
        self.own = common.engine()
        self.engine: WorkerEngine = self.own
        self.encoder = UpdateEncoder(self.engine, run.updates)
        contribution = policies.contribution
        self.weights = WorkerWeights(self.engine, run.updates.codec, policies.pull, contribution)
        self.unit: LeasedUnit | None = None
        self.round, self.server_step = 0, 0.0
        self.feed: Any = None
        self.producer = contribution.producer(self, NoWorkerCheckpoint(), common.spans)
        self.sync_delay = 0
        """A virtual worker computes all inner steps of an update at once, so answers are applied at their end."""

    # --- ProducerContext -------------------------------------------------------------------------------

    def await_answer(self) -> None: ...
    def repeat_number(self) -> None: ...
    def still_wanted(self, unit: LeasedUnit) -> bool:
        return True

    def report(self, text: str) -> None: ...
    def move_to(self, place: SeatAssigned) -> None:
        self.take_seat(*place)

    @property
    def next_seat(self) -> SeatAssigned:
        return SeatAssigned(0, *self.position())

    # --- UpdateSource, for the virtual worker ----------------------------------------------------------

    def take_seat(self, seat: int, epoch: int, position: int) -> None:
        self.common.batched_steps.drop(self.own)
        if self.common.units is None:
            self.feed = PrefetchedFeed(self.common.feed(seat, epoch, position))

    def position(self) -> tuple[int, int]:
        if self.unit is not None:
            return self.unit.epoch, self.unit.start + self.unit.batches
        state = self.feed.state_dict()
        return state["epoch"], state["position"]

    def begin(self) -> int:
        steps = self.producer.inner_steps
        self.common.batched_steps.begin(self.own, self.feed, steps)
        return max(1, steps) * self.accumulation

    def make(self, have: int, unit: LeasedUnit | None) -> EncodedUpdate | None:
        self.unit = unit
        if unit is not None:
            self.feed = self.common.feed(0, unit.epoch, unit.start)
        self.common.batched_steps.finish(self.own)
        made = self.producer.make()
        if made is None:
            return None
        if self.false:
            made.vector.mul_(_FALSE)
        frames = tuple(bytes(frame) for frame in self.encoder.frames(made.vector, made.samples, made.span))
        metrics, number = {name: float(value) for name, value in made.metrics.items()}, -1 if unit is None else unit.number
        weight, place = float(made.weight), self.position()
        return Contribute("", 0, 0, made.base, 0, weight, made.samples, *place, made.batches, -1, metrics, number), frames

    def on_answer(self, news: RunNews, status: str | None) -> None:
        self.server_step, self.round = news.header["step"], news.header["version"]
        if status == "accepted" and not news.afresh:
            self.weights.note_lag(news.header["version"] - self.weights.version - 1)
        self.weights.load(news)
        self.producer.on_answer(news, status)


UpdateSource = _TimedWorker | _LearningWorker
