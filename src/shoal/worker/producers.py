"""What a worker sends, and how it is computed: the gradient of a step, DiLoCo's pseudo-gradient, a unit's mean gradient, or rollouts.

A strategy chooses one of the contribution policies at the end of this file; the policy makes the producer that does the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from shoal.errors import ShoalError, out_of_memory
from shoal.models.generation.batch_sampling import sample, tokens_to_send
from shoal.models.generation.decoding import group_draws
from shoal.models.generation.side_texts import make_side_texts
from shoal.tasks import Batch
from shoal.updates.answer_frames import pack
from shoal.updates.fragments import Span
from shoal.worker.interfaces import Feed, StepResult, Window
from shoal.worker.session import LeasedUnit, RunNews, SeatAssigned
from shoal.worker.update_encoding import UpdateEncoder, WorkerEngine
from shoal.worker.weights import WorkerWeights
from shoal.worker.worker_state import PartialRound, RoundStart, WorkerCheckpoint

_ALL = slice(None)


class ProducedContribution(NamedTuple):
    """What is to be sent."""

    vector: Tensor
    metrics: dict[str, Tensor]
    weight: int
    samples: int
    base: int
    """The version that it was computed on."""
    batches: int
    span: slice = _ALL
    """Which part of the weights it is about."""
    frames: list[memoryview] | None = None
    """What travels, where that is no update of the weights; None: the vector, as the codec makes it smaller."""


class ProducerContext(Protocol):
    """The worker, as far as a producer must know it."""

    engine: WorkerEngine
    weights: WorkerWeights
    outgoing: UpdateEncoder
    accumulation: int
    ranks: int
    unit: LeasedUnit | None
    """What the worker has leased."""

    @property
    def round(self) -> int: ...
    @property
    def feed(self) -> Feed: ...
    @property
    def begins_at(self) -> SeatAssigned:
        """The place at the data that its next contribution begins at."""
        ...

    @property
    def server_step(self) -> float: ...
    @property
    def over(self) -> bool:
        """Whether there is nothing more to do: the run is over, or the worker was asked to stop."""
        ...

    def settle(self) -> None:
        """Hear what became of the contribution that is under way."""
        ...

    def move_to(self, place: SeatAssigned) -> None:
        """Go to a place at the data."""
        ...

    def send_again(self) -> None:
        """What is sent next was sent before, by an earlier life of this worker, and taken."""
        ...

    def wanted(self, unit: LeasedUnit) -> bool:
        """A batch of the unit is done: does anybody still wait for its result?"""
        ...

    def tell(self, text: str) -> None: ...


class Producer(Protocol):
    """Makes contributions."""

    overlap: int
    """Steps after which the answer to the last contribution is waited for; 0: before the next one is begun."""
    failure: str
    """Why nothing came of the last one, where that is for others to know."""

    def make(self) -> ProducedContribution | None:
        """The next contribution; None: nothing came of it."""
        ...

    def refreshed(self, news: RunNews, status: str | None) -> None:
        """An answer has come: to a contribution with this outcome, or to a pull."""
        ...


class GradientProducer:
    """The gradient of one step."""

    overlap, failure = 0, ""

    def __init__(self, worker: ProducerContext, own_steps: bool) -> None:
        """`own_steps`: whether the worker also steps its own weights with the gradient."""
        self.worker, self.own_steps = worker, own_steps
        size = worker.engine.vector.numel()
        self._vectors = [torch.empty(size), torch.empty(size)]
        """One is on its way while the other is filled."""

    def make(self) -> ProducedContribution | None:
        worker, feed = self.worker, self.worker.feed
        result = worker.outgoing.gradients([next(feed) for _ in range(worker.accumulation)])
        vector = self._vectors[-1]
        vector.copy_(worker.engine.gradient)
        if not worker.outgoing.limit(vector):
            return None  # the other vector may still be under way: the next gradient goes into this one again
        self._vectors.reverse()
        if self.own_steps:
            worker.engine.apply_own(worker.server_step)
        batches = worker.accumulation * worker.ranks
        return ProducedContribution(vector, result.metrics, result.weight, result.samples, worker.weights.version, batches)

    def refreshed(self, news: RunNews, status: str | None) -> None:
        """There is nothing to do: the next gradient is taken at the weights there are."""


class PseudoGradientProducer:
    """How far many steps led, θ₀ − θ, with the worker's own optimizer, which is never started over.

    θ₀ is what the coordinator sent last. Where weights are exchanged in fragments, each fragment has a θ₀ of its own age.
    """

    failure = ""

    def __init__(
        self, worker: ProducerContext, policy: PseudoGradientContribution, keeper: WorkerCheckpoint, spans: tuple[Span, ...]
    ) -> None:
        self.worker, self.policy, self.keeper, self.spans = worker, policy, keeper, spans
        self.overlap = policy.overlap
        self.asked_steps = policy.steps
        """Steps until the next contribution."""
        self.walked = 0
        """Steps since the last one."""
        self._vector = torch.empty(worker.engine.vector.numel())
        self._restored = False
        self._half: PartialRound | None = None
        """What an earlier life of the worker kept of the round that comes next."""

    def make(self) -> ProducedContribution | None:
        worker = self.worker
        window = Window()
        samples = self._walk(window)
        if samples is None:
            return None
        weight = window.weight
        metrics = {name: torch.tensor(value) for name, value in window.take(worker.engine.world).items()}
        metrics |= {f"inner_{name}": torch.tensor(value) for name, value in worker.engine.learning_rates().items()}
        metrics["inner_steps"] = torch.tensor(float(self.walked))
        span = slice(*self.spans[worker.round % len(self.spans)]) if self.spans else _ALL
        vector = self._difference(span)
        if not worker.outgoing.limit(vector):
            worker.engine.forget_past()
            worker.weights.go_back()
            self.keeper.forget_half()
            return None
        batches, self.walked = self.walked * worker.accumulation * worker.ranks, 0
        return ProducedContribution(vector, metrics, weight, samples, worker.weights.version, batches, span)

    def _walk(self, window: Window) -> int | None:
        """Step by step; the samples, or None where that came to nothing: the run is over, or the data was another worker's by then."""
        worker, samples, due, kept = self.worker, self._begin(window), False, False
        feed = worker.feed
        while self.walked < self.asked_steps:
            if self.walked == self.overlap:
                worker.settle()
            if worker.over or worker.feed is not feed:
                return None
            if due and self.walked >= self.overlap:  # before that, the last round is not settled
                kept = self._keep_half(window, samples)
            until = self.overlap if self.walked < self.overlap else self.asked_steps
            until_half = self.keeper.until_half(worker.engine.step_count)
            result, steps = worker.engine.walk(feed, worker.accumulation, min(until - self.walked, until_half))
            window.add(result)
            samples += result.samples
            self.walked += steps
            due = steps == until_half
        if kept and not self.overlap:  # the round ends when all others have sent: until then this is all that there is of this one's
            self._keep_half(window, samples)
        return samples

    # --- half rounds -------------------------------------------------------------------------------

    def _begin(self, window: Window) -> int:
        """Begin a round, or go on in the middle of it; the samples so far."""
        half, self._half, self.walked, worker = self._half, None, 0, self.worker
        if half is None:
            return 0
        if half.began.place != worker.begins_at:
            worker.send_again()
        worker.move_to(half.place)
        self.keeper.resume_half(worker.outgoing.residual, within=True)
        window.sums = {name: torch.tensor(value, device=worker.engine.device) for name, value in half.sums.items()}
        window.weight, self.walked, self.asked_steps = half.weight, half.steps, min(half.asked_steps, self.asked_steps)
        where = "at the end" if half.is_whole else "in the middle"
        worker.tell(f"going on {where} of round {half.began.version + 1}, after step {half.steps} of {half.asked_steps}")
        return half.samples

    def _keep_half(self, window: Window, samples: int) -> bool:
        worker = self.worker
        at = worker.feed.state_dict()
        place = SeatAssigned(worker.begins_at.seat, at["epoch"], at["position"])
        sums = {name: float(value) for name, value in window.sums.items()}
        half = PartialRound(self._beginning(), place, self.walked, self.asked_steps, samples, window.weight, sums)
        self.keeper.save_half(half, worker.outgoing.residual)
        return True

    def _beginning(self) -> RoundStart:
        weights = self.worker.weights
        return RoundStart(weights.version, weights.checksum(), self.worker.begins_at)

    def _difference(self, span: slice) -> Tensor:
        """What to send: how far the steps led, or where they led where the new weights are the mean of all."""
        base = self.worker.weights.base[span]
        vector = self._vector[: base.numel()]
        vector.copy_(self.worker.engine.vector[span])
        return vector if self.policy.averages else torch.sub(base, vector, out=vector)

    def refreshed(self, news: RunNews, status: str | None) -> None:
        worker = self.worker
        self.asked_steps = news.header.get("inner_steps", self.asked_steps)
        self._count_steps()
        ended = status == "accepted" and news.header.get("weights", "same") != "same"
        if status != "accepted":
            worker.weights.go_back()
        if ended:
            self.keeper.save(worker.weights.version, worker.outgoing.residual)
        if ended or status not in (None, "accepted", "finished"):  # a run that is interrupted may go on in this very round
            self.keeper.forget_half()
        if not self._restored:  # the worker has just come, or come back
            self._restored = True
            self._restore()

    def _count_steps(self) -> None:
        """The schedule goes by the steps of all rounds."""
        self.worker.engine.step_count = round(self.worker.server_step * self.policy.steps) + self.walked

    def _restore(self) -> None:
        """Look for what an earlier life of the worker kept."""
        worker, residual = self.worker, self.worker.outgoing.residual
        half = self.keeper.half_round(self._beginning())
        if half is not None and half.began.version == worker.weights.version:
            self._half = half
            return
        if half is not None:  # others have ended the round meanwhile
            worker.tell(f"going on after round {half.began.version + 1}, which this worker had finished")
            self.keeper.resume_half(residual, within=False)
        else:
            self.keeper.restore(worker.weights.version, residual)
        self._count_steps()  # what was kept may be of an older round
        if not self.spans:
            worker.weights.go_back()


class Learned(NamedTuple):
    """Figures of a unit: sums, and what they are sums over."""

    metrics: dict[str, Tensor]
    weight: int
    samples: int


class UnitGradientProducer:
    """The mean gradient over a leased unit. Where memory is short, a batch is taken in parts."""

    overlap = 0

    def __init__(self, worker: ProducerContext) -> None:
        self.worker = worker
        self.failure = ""
        self._total = torch.zeros(worker.engine.vector.numel())
        self._most: int | None = None
        """Samples that fit into memory at once; None: whole batches do."""

    def make(self) -> ProducedContribution | None:
        worker, unit = self.worker, self.worker.unit
        assert unit is not None
        learned = self._learn(unit, worker.feed)
        if learned is None:
            return None
        if not worker.outgoing.limit(self._total):
            self.failure = "the gradient is not finite"
            return None
        means = {name: value / learned.weight for name, value in learned.metrics.items()}
        return ProducedContribution(self._total, means, learned.weight, learned.samples, worker.weights.version, unit.batches)

    def refreshed(self, news: RunNews, status: str | None) -> None:
        """There is nothing to do: the next unit is for the weights there are."""

    def _learn(self, unit: LeasedUnit, feed: Feed) -> Learned | None:
        """The mean gradient over the unit is left in `_total`; None where the unit is not wanted any more."""
        self._total.zero_()
        metrics: dict[str, Tensor] = {}
        weight = samples = 0
        for _ in range(unit.batches):
            for result in self._in_parts(next(feed)):
                if self.worker.over:
                    return None
                if not self.worker.wanted(unit):
                    return None
                self._total.lerp_(self.worker.engine.gradient.float().cpu(), result.weight / max(1, weight + result.weight))
                for name, value in result.metrics.items():
                    metrics[name] = metrics.get(name, 0.0) + value * result.weight
                weight, samples = weight + result.weight, samples + result.samples
        return Learned(metrics, weight, samples)

    def _in_parts(self, batch: Batch) -> Iterator[StepResult]:
        """Gradients over a batch: of all of it, or of parts that fit into memory. The processes of an island take whole batches only, since
        all must take the same ones."""
        size, at = len(next(iter(batch.values()))), 0
        while at < size or not size:
            most = min(self._most or size, size - at)
            part = batch if most == size else {name: value[at : at + most] for name, value in batch.items()}
            try:
                result = self.worker.outgoing.gradients([part])
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or self.worker.ranks > 1:
                    raise
                self._shrink(most)
                continue
            yield result
            if not size:
                return
            at += most

    def _shrink(self, most: int) -> None:
        if most == 1:
            self.failure = "out of memory with a single sample"
            raise ShoalError("there is not enough memory here for a single sample: close other programs, or use training.device=cpu")
        self._most = most // 2
        if self.worker.engine.device.type == "cuda":
            torch.cuda.empty_cache()
        self.worker.tell(f"out of memory with {most} samples at once: going on with {self._most}")


def _grouped(of_prompts: Sequence[Any], group: int) -> list[Any]:
    """What belongs to prompts, for each of the answers to them."""
    return [one for one in of_prompts for _ in range(group)]


class RolloutProducer:
    """Answers to the prompts of a leased unit: their tokens, and nothing that a worker could have made up."""

    overlap, failure = 0, ""

    def __init__(self, worker: ProducerContext, policy: RolloutContribution) -> None:
        self.worker, self.policy = worker, policy

    def make(self) -> ProducedContribution:
        unit, policy, engine = self.worker.unit, self.policy, cast("Any", self.worker.engine)
        assert unit is not None
        prompts, end = unit.given["prompts"], unit.given["end"]
        drawn = sample(
            engine.task.players["model"],
            _grouped(prompts, policy.group),
            max_new_tokens=policy.length,
            temperature=policy.temperature,
            draws=group_draws(policy.seed, unit.given["first"], prompts, policy.group),
            eos_id=end,
            pad_id=0,
            beside=make_side_texts(engine.task.finder, *(_grouped(unit.given.get(name, ()), policy.group) for name in ("contexts", "own"))),
        )
        tokens_BT, weight = tokens_to_send(drawn), int(drawn.real_BT.sum())
        return ProducedContribution(
            tokens_BT, {}, weight, len(tokens_BT), self.worker.weights.version, unit.batches, frames=pack(tokens_BT)
        )

    def refreshed(self, news: RunNews, status: str | None) -> None:
        """There is nothing to do but to tell whoever sits here, where the coordinator cannot follow the answers."""
        if status == "inexact":
            self.worker.tell(
                "warning: the coordinator gets other tokens from the same weights and draws, and refused this unit: something here "
                "computes otherwise (another precision, a changed program, a faulty machine)"
            )


# --- the policies -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientContribution:
    """A worker sends the gradient of every step."""

    own_steps: bool = False
    """Whether it also steps its own weights with it, between pulls."""
    steps: int = 1
    """Steps that make a contribution."""
    alone: bool = False
    """Whether it steps alone between contributions."""
    balanced: bool = False
    """Whether slower workers take fewer steps."""
    fragments: int = 1
    """Parts of the weights that take turns."""
    overlap: int = 0
    """Steps that a worker goes on while its contribution is on its way."""
    averages: bool = False
    """Whether the new weights are the mean of the workers' own: then those are sent, not how far they moved."""

    def producer(self, worker: ProducerContext, keeper: WorkerCheckpoint, spans: tuple[Span, ...]) -> Producer:
        """What makes the contributions of a worker. `keeper` keeps what only the worker knows; `spans`: parts of the weights that rounds
        take in turn."""
        return GradientProducer(worker, self.own_steps)

    def passes(self, version: int, every: int) -> bool:
        """Settings count the steps of a worker. Is this version the first at or after one of every so many?"""
        return version * self.steps // every > (version - 1) * self.steps // every


@dataclass(frozen=True)
class PseudoGradientContribution(GradientContribution):
    """A worker takes many steps alone, with its own optimizer, and sends how far they led it."""

    alone: bool = True

    def producer(self, worker: ProducerContext, keeper: WorkerCheckpoint, spans: tuple[Span, ...]) -> Producer:
        return PseudoGradientProducer(worker, self, keeper, spans)


@dataclass(frozen=True)
class UnitGradientContribution(GradientContribution):
    """A worker sends the mean gradient over a unit of the data that it has leased."""

    def producer(self, worker: ProducerContext, keeper: WorkerCheckpoint, spans: tuple[Span, ...]) -> Producer:
        return UnitGradientProducer(worker)


@dataclass(frozen=True)
class RolloutContribution(GradientContribution):
    """A worker sends its answers to the prompts that it has leased."""

    group: int = 1
    """Answers to each prompt."""
    length: int = 32
    """Tokens of the longest answer."""
    temperature: float = 1.0
    seed: int = 0

    def producer(self, worker: ProducerContext, keeper: WorkerCheckpoint, spans: tuple[Span, ...]) -> Producer:
        return RolloutProducer(worker, self)
