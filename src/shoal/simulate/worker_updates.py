"""What virtual workers send: numbers that take the time and the bytes of the real ones, or what they really learn.

`Timing` is for any number of workers and any size of model: every worker sends one of a few updates that were encoded once, and only time,
bytes and decisions are simulated. `Learning` lets every worker have an engine of its own and the real producers: what is learned is real.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.config.schema.updates import Updates
from shoal.runs.build_run import Parts, feed_of
from shoal.runs.live_objects import NOTHING, players_of, task_of
from shoal.runs.worker_run import pieces_of
from shoal.simulate.batched_workers import Ahead, TaughtEngine, Together
from shoal.strategies import Policies
from shoal.updates import codecs
from shoal.updates.fragments import Span
from shoal.worker.interfaces import Feed
from shoal.worker.session import Frames, News, Seated, Unit
from shoal.worker.update_encoding import Engine, Outgoing
from shoal.worker.weights import Weights
from shoal.worker.worker_state import KeepsNothing

STAND_IN = 10_000
"""A larger model's update is simulated by so many numbers; the links are told how long it really is."""
_POOL = 16
_FALSE = -10.0
"""What a false worker multiplies its update with."""


class Parcel(NamedTuple):
    """What is to be sent, and the batches that it took."""

    frames: Frames
    weight: float
    samples: int
    base: int
    batches: int
    metrics: Mapping[str, float]


class Mind(Protocol):
    """What a virtual worker thinks with."""

    overlap: int
    """Steps that it goes on while its last contribution is under way; 0: none."""

    def sit(self, seat: int, epoch: int, position: int) -> None: ...
    def place(self) -> tuple[int, int]:
        """Epoch and batch that it has come to."""
        ...

    def begin(self, have: int) -> int:
        """Begin with the next contribution, on this version of the weights; return the batches that it takes. The weights stay as they are
        until it is made."""
        ...

    def make(self, have: int, unit: Unit | None) -> Parcel | None:
        """What was begun; or what was learned from a unit, at once."""
        ...

    def refreshed(self, news: News, status: str | None) -> None: ...


class Drift:
    """Weights that go where updates lead them, by plain gradient descent: the least that a learner can do."""

    def __init__(self, size: int) -> None:
        self.vector, self.buffers = torch.zeros(size), torch.empty(0)

    def apply(self, update: Tensor, buffers: Tensor, step: float, share: float) -> Mapping[str, float]:
        self.vector.add_(update, alpha=-0.001 * share)
        return {}


class Timing:
    """Updates that were encoded once, for all workers."""

    def __init__(self, policies: Policies, updates: Updates, size: int, samples_per_batch: int, batches: int, shard: int | None) -> None:
        """`size`: of the real model; `batches`: of one step; `shard`: batches of an epoch that a worker has, None for a stream."""
        self.policies, self.samples_per_batch, self.batches, self.shard = policies, samples_per_batch, batches, shard
        self.size = min(size, STAND_IN)
        self.scale = size / self.size
        generator = torch.Generator().manual_seed(0)
        vectors = [torch.randn(self.size, generator=generator) * 0.01 for _ in range(_POOL)]
        self.honest = [codecs.encode(updates.codec, vector, None) for vector in vectors]
        self.false = [codecs.encode(updates.codec, _FALSE * vector, None) for vector in vectors]
        self.update_bytes = self.scale * sum(map(len, self.honest[0]))

    def mind(self, false: bool) -> Mind:
        return _TimingMind(self, false)


class _TimingMind:
    """A place at the data, and the steps that were asked for."""

    def __init__(self, common: Timing, false: bool) -> None:
        self.common, self._frames = common, common.false if false else common.honest
        contribution = common.policies.contribution
        self.overlap = getattr(contribution, "overlap", 0)
        self._steps, self._made = contribution.steps, 0
        self._epoch = self._position = 0

    def sit(self, seat: int, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position

    def place(self) -> tuple[int, int]:
        return self._epoch, self._position

    def begin(self, have: int) -> int:
        return self._steps * self.common.batches

    def make(self, have: int, unit: Unit | None) -> Parcel:
        common, self._made = self.common, self._made + 1
        batches = self._steps * common.batches if unit is None else unit.batches
        self._move(batches, unit)
        samples = batches * common.samples_per_batch
        return Parcel(self._frames[self._made % _POOL], float(samples), samples, have, batches, {})

    def _move(self, batches: int, unit: Unit | None) -> None:
        shard = self.common.shard
        if unit is not None:
            self._epoch, self._position = unit.epoch, unit.start + unit.batches
        elif shard is None:
            self._position += batches
        else:
            whole = self._epoch * shard + self._position + batches
            self._epoch = (whole - 1) // shard
            self._position = whole - self._epoch * shard

    def refreshed(self, news: News, status: str | None) -> None:
        self._steps = news.header.get("inner_steps", self._steps)


class Learning:
    """An engine for each worker, on the same data, with the real producers."""

    scale, update_bytes = 1.0, 0.0

    def __init__(self, parts: Parts, policies: Policies, shards: int, spans: tuple[Span, ...]) -> None:
        self.parts, self.policies, self.shards, self.spans = parts, policies, shards, spans
        self.pieces = pieces_of(parts, policies) if policies.feed.leased else None

        self.together = Together(parts.run, self.engine(), parts.data.info.vocab_size or 0, policies.feed.leased)

    def engine(self) -> TaughtEngine:
        run, samples = self.parts.run, self.parts.data
        task = task_of(run, NOTHING, players_of(run, NOTHING, samples.info), samples.info)
        return TaughtEngine(run, task, self.parts.single.total_steps)

    def mind(self, false: bool) -> Mind:
        return _LearningMind(self, false)

    def feed(self, seat: int, epoch: int, position: int) -> Any:
        if self.pieces is not None:
            return self.pieces.at(epoch, position)
        feed = feed_of(self.parts.run, self.parts.data, seat, self.shards)
        feed.load_state_dict(feed.state_dict() | {"epoch": epoch, "position": position})
        return feed


class _LearningMind:
    """A worker as its producer sees it, without the waiting."""

    ranks, over = 1, False

    def __init__(self, common: Learning, false: bool) -> None:
        run, policies = common.parts.run, common.policies
        self.common, self.false, self.accumulation = common, false, run.training.gradient_accumulation_steps
        self.own = common.engine()
        self.engine: Engine = self.own
        self.outgoing = Outgoing(self.engine, run.updates)
        contribution = policies.contribution
        self.weights = Weights(self.engine, run.updates.codec, policies.pull, own_steps=contribution.own_steps, alone=contribution.alone)
        self.unit: Unit | None = None
        self.round, self.server_step = 0, 0.0
        self._feed: Any = None
        self.producer = contribution.producer(self, KeepsNothing(), common.spans)
        self.overlap = 0
        """A virtual worker learns all of a walk at once, so what arrives meanwhile is taken at its end."""

    # --- what a producer asks of its worker ---------------------------------------------------------

    @property
    def feed(self) -> Feed:
        feed: Feed = self._feed
        return feed

    def settle(self) -> None: ...
    def send_again(self) -> None: ...
    def wanted(self, unit: Unit) -> bool:
        return True

    def tell(self, text: str) -> None: ...
    def move_to(self, place: Seated) -> None:
        self.sit(*place)

    @property
    def begins_at(self) -> Seated:
        return Seated(0, *self.place())

    # --- what the virtual worker asks ----------------------------------------------------------------

    def sit(self, seat: int, epoch: int, position: int) -> None:
        self.common.together.drop(self.own)
        if self.common.pieces is None:
            self._feed = Ahead(self.common.feed(seat, epoch, position))

    def place(self) -> tuple[int, int]:
        if self.unit is not None:
            return self.unit.epoch, self.unit.start + self.unit.batches
        state = self._feed.state_dict()
        return state["epoch"], state["position"]

    def begin(self, have: int) -> int:
        steps = getattr(self.producer, "asked_steps", 0)
        self.common.together.begin(self.own, self._feed, steps)
        return max(1, steps) * self.accumulation

    def make(self, have: int, unit: Unit | None) -> Parcel | None:
        self.unit = unit
        if unit is not None:
            self._feed = self.common.feed(0, unit.epoch, unit.start)
        self.common.together.finish(self.own)
        made = self.producer.make()
        if made is None:
            return None
        if self.false:
            made.vector.mul_(_FALSE)
        frames = tuple(bytes(frame) for frame in self.outgoing.frames(made.vector, made.samples, made.span))
        metrics = {name: float(value) for name, value in made.metrics.items()}
        return Parcel(frames, float(made.weight), made.samples, made.base, made.batches, metrics)

    def refreshed(self, news: News, status: str | None) -> None:
        self.server_step, self.round = news.header["step"], news.header["version"]
        if status == "accepted" and not news.afresh:
            self.weights.note_lag(news.header["version"] - self.weights.version - 1)
        self.weights.load(news)
        self.producer.refreshed(news, status)


def seeded(seed: int) -> random.Random:
    """Dice for everything that is drawn; what engines draw follows the same seed."""
    torch.manual_seed(seed)
    return random.Random(seed)
