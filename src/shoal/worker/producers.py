"""Producers of contributions: the gradient of a step, DiLoCo's pseudo-gradient, a unit's mean gradient, or rollouts.

A strategy chooses one of the contribution policies at the end of this file; the policy builds the producer that computes the contributions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from shoal.data import Feed
from shoal.errors import ShoalError, out_of_memory
from shoal.models.generation.batch_sampling import sample, tokens_to_send
from shoal.models.generation.decoding import group_draws
from shoal.models.generation.side_texts import make_side_texts
from shoal.protocol.messages import SeatAssigned
from shoal.tasks import Batch, MetricMeans, StepResult
from shoal.updates.answer_frames import pack
from shoal.updates.contribution_policy import ContributionPolicy
from shoal.updates.fragments import Span
from shoal.updates.worker_state import PartialRound, RoundStart, WorkerCheckpoint
from shoal.worker.session import LeasedUnit, RunNews
from shoal.worker.update_encoding import UpdateEncoder, WorkerEngine
from shoal.worker.weights import WorkerWeights

_ALL = slice(None)


def _next(worker: ProducerContext, feed: Feed) -> Batch:
    with worker.engine.phases.on_host("data"):
        return next(feed)


def _why_dropped(metrics: Mapping[str, Tensor]) -> str:
    """What to tell the user of an update that must not be sent."""
    losses = [(name, float(value)) for name, value in metrics.items() if name.endswith("loss") and not math.isfinite(float(value))]
    what = f"the {losses[0][0]} is {losses[0][1]}" if losses else "the update is not finite"
    return f"warning: {what}: nothing is sent for this step, and the run goes on"


class ProducedContribution(NamedTuple):
    """A contribution as a producer made it, before it is encoded."""

    vector: Tensor
    metrics: dict[str, Tensor]
    weight: int
    samples: int
    base: int
    """The version of the weights that it was computed on."""
    batches: int
    span: slice = _ALL
    """The fragment of the weights that the vector is for."""
    frames: list[memoryview] | None = None
    """Encoded rollouts; None: the vector is an update of the weights, to be encoded by the codec."""


class ProducerContext(Protocol):
    """The part of a worker that its producer uses."""

    engine: WorkerEngine
    weights: WorkerWeights
    encoder: UpdateEncoder
    accumulation: int
    """Batches of a step."""
    ranks: int
    """Processes of the worker."""
    unit: LeasedUnit | None
    """The unit that the worker has leased."""

    @property
    def round(self) -> int: ...
    @property
    def feed(self) -> Feed: ...
    @property
    def next_seat(self) -> SeatAssigned:
        """Where in the data the worker's next contribution begins."""

    @property
    def server_step(self) -> float: ...
    @property
    def over(self) -> bool:
        """Whether the run is over, or the worker was asked to stop."""

    @property
    def stopping(self) -> bool:
        """Whether the worker was asked to stop, and the run is not over."""

    def await_answer(self) -> None:
        """Wait for the answer to the contribution that is under way, and apply it."""

    def move_to(self, place: SeatAssigned) -> None:
        """Continue at another place in the data."""

    def repeat_number(self) -> None:
        """Give the next contribution the number of the last one: an earlier process of this worker sent it, and it was accepted."""

    def still_wanted(self, unit: LeasedUnit) -> bool:
        """Called after each batch of a unit: whether the worker's lease of the unit still holds."""

    def report(self, text: str) -> None:
        """Show a line to the user."""


class Producer(ABC):
    """Computes a worker's contributions."""

    sync_delay = 0
    """Inner steps that are taken before the answer to the last contribution is awaited; 0: the answer is awaited before the first."""
    inner_steps = 0
    """Inner steps of the next contribution; 0: it is made of none."""
    failure = ""
    """Why the last unit produced no contribution, if the coordinator has to be informed."""

    @abstractmethod
    def make(self) -> ProducedContribution | None:
        """Compute the next contribution, or None if this step produced none."""

    def on_answer(self, news: RunNews, status: str | None) -> None:
        """Called when the answer to a contribution with this outcome has come; None: the answer to a pull."""
        return


class GradientProducer(Producer):
    """The gradient of one step."""

    def __init__(self, worker: ProducerContext, own_steps: bool) -> None:
        """`own_steps`: whether the worker also steps its own weights with the gradient."""
        self.worker, self.own_steps = worker, own_steps
        size = worker.engine.vector.numel()
        self._vectors = [torch.empty(size), torch.empty(size)]
        """One is being sent while the other is filled."""

    def make(self) -> ProducedContribution | None:
        worker, feed = self.worker, self.worker.feed
        result = worker.encoder.gradients([_next(worker, feed) for _ in range(worker.accumulation)])
        vector = self._vectors[-1]
        vector.copy_(worker.engine.gradient)
        if not worker.encoder.limit(vector):
            worker.report(_why_dropped(result.metrics))
            return None  # the other vector may still be being sent: the next gradient goes into this one again
        self._vectors.reverse()
        if self.own_steps:
            worker.engine.apply_own(worker.server_step)
        batches = worker.accumulation * worker.ranks
        return ProducedContribution(vector, result.metrics, result.weight, result.samples, worker.weights.version, batches)


class PseudoGradientProducer(Producer):
    """DiLoCo's pseudo-gradient θ₀ − θ after many inner steps; the inner optimizer keeps its state. θ₀ is what the coordinator sent last;
    each fragment that is exchanged on its own has its own version of θ₀."""

    def __init__(
        self, worker: ProducerContext, policy: PseudoGradientContribution, checkpoint: WorkerCheckpoint, spans: tuple[Span, ...]
    ) -> None:
        self.worker, self.policy, self.checkpoint, self.spans = worker, policy, checkpoint, spans
        self.sync_delay = policy.sync_delay
        self.inner_steps = policy.inner_steps
        """Inner steps of the round, as the coordinator says."""
        self.steps_done = 0
        """Inner steps of the round that were taken."""
        self._vector = torch.empty(worker.engine.vector.numel())
        self._restored = False
        self._partial: PartialRound | None = None
        """The partial round to resume, which an earlier process of this worker saved."""

    def make(self) -> ProducedContribution | None:
        worker, means = self.worker, MetricMeans()
        samples = self._take_inner_steps(means)
        if samples is None:
            return None
        metrics = means.means()
        metrics |= {f"inner_{name}": torch.tensor(value) for name, value in worker.engine.learning_rates().items()}
        metrics["inner_steps"] = torch.tensor(float(self.steps_done))
        span = slice(*self.spans[worker.round % len(self.spans)]) if self.spans else _ALL
        vector = self._pseudo_gradient(span)
        if not worker.encoder.limit(vector):
            worker.report(_why_dropped(metrics))
            worker.engine.forget_past()
            worker.weights.go_back()
            self.checkpoint.delete_partial_round()
            return None
        batches, self.steps_done = self.steps_done * worker.accumulation * worker.ranks, 0
        return ProducedContribution(vector, metrics, means.weight, samples, worker.weights.version, batches, span)

    def _take_inner_steps(self, means: MetricMeans) -> int | None:
        """The samples of the round; None: the run is over, or the coordinator gave this part of the data to another worker."""
        worker, samples, due, saved = self.worker, self._begin_round(means), False, False
        feed = worker.feed
        while self.steps_done < self.inner_steps:
            if self.steps_done == self.sync_delay:
                worker.await_answer()
            if worker.over or worker.feed is not feed:
                self._keep_round(means, samples, feed)
                return None
            if due and self.steps_done >= self.sync_delay:  # before that, the last round is not settled
                saved = self._save_partial_round(means, samples)
            until = self.sync_delay if self.steps_done < self.sync_delay else self.inner_steps
            until_save = self.checkpoint.steps_until_save(worker.engine.step_count)
            result, steps = worker.engine.take_steps(feed, worker.accumulation, min(until - self.steps_done, until_save))
            means.add(result.metrics, result.weight)
            samples += result.samples
            self.steps_done += steps
            due = steps == until_save
        if saved and not self.sync_delay:  # the round stays open until the other workers have sent: save this worker's part of it
            self._save_partial_round(means, samples)
        return samples

    # --- partial rounds: a worker that was interrupted goes on in the middle of a round ----------------

    def _begin_round(self, means: MetricMeans) -> int:
        """Begin a round, or resume a partial one; return the samples so far."""
        partial, self._partial, self.steps_done, worker = self._partial, None, 0, self.worker
        if partial is None:
            return 0
        if partial.began.place != worker.next_seat:
            worker.repeat_number()
        worker.move_to(partial.place)
        self.checkpoint.resume_partial_round(worker.encoder.residual, within=True)
        means.sums = {name: torch.tensor(value, device=worker.engine.device) for name, value in partial.sums.items()}
        means.weight, self.steps_done = partial.weight, partial.steps
        self.inner_steps = min(partial.inner_steps, self.inner_steps)
        where = "at the end" if partial.is_whole else "in the middle"
        worker.report(f"going on {where} of round {partial.began.version + 1}, after step {partial.steps} of {partial.inner_steps}")
        return partial.samples

    def _keep_round(self, means: MetricMeans, samples: int, feed: Feed) -> None:
        """Save the steps of a round that the worker leaves because it was stopped, so that it can go on with them when it returns."""
        worker = self.worker
        if worker.stopping and worker.feed is feed and self.steps_done > self.sync_delay and self.checkpoint.keeps_partial_rounds:
            self._save_partial_round(means, samples)
            worker.report(f"saved {self.steps_done} of {self.inner_steps} steps of round {worker.weights.version + 1}")

    def _save_partial_round(self, means: MetricMeans, samples: int) -> bool:
        worker = self.worker
        at = worker.feed.state_dict()
        place = SeatAssigned(worker.next_seat.seat, at["epoch"], at["position"])
        sums = {name: float(value) for name, value in means.sums.items()}
        partial = PartialRound(self._round_start(), place, self.steps_done, self.inner_steps, samples, means.weight, sums)
        self.checkpoint.save_partial_round(partial, worker.encoder.residual)
        return True

    def _round_start(self) -> RoundStart:
        weights = self.worker.weights
        return RoundStart(weights.version, weights.checksum(), self.worker.next_seat)

    def _pseudo_gradient(self, span: slice) -> Tensor:
        """θ₀ − θ; or θ itself, where the outer step is the plain mean of the workers' weights."""
        base = self.worker.weights.base[span]
        vector = self._vector[: base.numel()]
        vector.copy_(self.worker.engine.vector[span])
        return vector if self.policy.sends_weights else torch.sub(base, vector, out=vector)

    def on_answer(self, news: RunNews, status: str | None) -> None:
        worker = self.worker
        self.inner_steps = news.header.get("inner_steps", self.inner_steps)
        self._set_step_count()
        ended = status == "accepted" and news.header.get("weights", "same") != "same"
        if status != "accepted":
            worker.weights.go_back()
        if ended:
            self.checkpoint.save(worker.weights.version, worker.encoder.residual)
        if ended or status not in (None, "accepted", "finished"):  # a run that is interrupted may go on in this very round
            self.checkpoint.delete_partial_round()
        if not self._restored:  # the worker has just joined, or joined again
            self._restored = True
            self._restore()

    def _set_step_count(self) -> None:
        """The inner learning-rate schedule counts the steps of all rounds."""
        self.worker.engine.step_count = round(self.worker.server_step * self.policy.inner_steps) + self.steps_done

    def _restore(self) -> None:
        """Load what an earlier process of this worker saved."""
        worker, residual = self.worker, self.worker.encoder.residual
        partial = self.checkpoint.find_partial_round(self._round_start())
        if partial is not None and partial.began.version == worker.weights.version:
            self._partial = partial
            return
        if partial is not None:  # the other workers have ended the round meanwhile
            worker.report(f"going on after round {partial.began.version + 1}, which this worker had finished")
            self.checkpoint.resume_partial_round(residual, within=False)
        else:
            self.checkpoint.restore(worker.weights.version, residual)
        self._set_step_count()  # the saved count may be of an older round
        if not self.spans:
            worker.weights.go_back()


class UnitGradientProducer(Producer):
    """The mean gradient over a leased unit. A batch that does not fit into memory is taken in parts."""

    def __init__(self, worker: ProducerContext) -> None:
        self.worker = worker
        self._mean_gradient = torch.zeros(worker.engine.vector.numel())
        self._most_samples: int | None = None
        """Samples that fit into memory at once; None: whole batches do."""

    def make(self) -> ProducedContribution | None:
        worker, unit = self.worker, self.worker.unit
        assert unit is not None
        means = MetricMeans()
        samples = self._take_gradients(unit, means)
        if samples is None:
            return None
        if not worker.encoder.limit(self._mean_gradient):
            worker.report(_why_dropped(means.means()))
            self.failure = "the gradient is not finite"
            return None
        return ProducedContribution(self._mean_gradient, means.means(), means.weight, samples, worker.weights.version, unit.batches)

    def _take_gradients(self, unit: LeasedUnit, means: MetricMeans) -> int | None:
        """The samples of the unit, whose mean gradient is left in `_mean_gradient`; None: the unit is not wanted any more."""
        self._mean_gradient.zero_()
        samples = 0
        for _ in range(unit.batches):
            for result in self._in_parts(_next(self.worker, self.worker.feed)):
                if self.worker.over or not self.worker.still_wanted(unit):
                    return None
                means.add(result.metrics, result.weight)
                self._mean_gradient.lerp_(self.worker.engine.gradient.float().cpu(), result.weight / max(1, means.weight))
                samples += result.samples
        return samples

    def _in_parts(self, batch: Batch) -> Iterator[StepResult]:
        """Gradients over a batch, or over parts that fit into memory. The processes of an island must take the same ones: whole batches."""
        size, at = len(next(iter(batch.values()))), 0
        while at < size or not size:
            most = min(self._most_samples or size, size - at)
            part = batch if most == size else {name: value[at : at + most] for name, value in batch.items()}
            try:
                result = self.worker.encoder.gradients([part])
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or self.worker.ranks > 1:
                    raise
                self._halve(most)
                continue
            yield result
            if not size:
                return
            at += most

    def _halve(self, most: int) -> None:
        if most == 1:
            self.failure = "out of memory with a single sample"
            raise ShoalError("there is not enough memory here for a single sample: close other programs, or use training.device=cpu")
        self._most_samples = most // 2
        if self.worker.engine.device.type == "cuda":
            torch.cuda.empty_cache()
        self.worker.report(f"out of memory with {most} samples at once: going on with {self._most_samples}")


def _repeated(of_prompts: Sequence[Any], group: int) -> list[Any]:
    """Each item `group` times, once for every answer to its prompt."""
    return [one for one in of_prompts for _ in range(group)]


class RolloutProducer(Producer):
    """Answers to the prompts of a leased unit. Only their tokens are sent: the coordinator recomputes everything else."""

    def __init__(self, worker: ProducerContext, policy: RolloutContribution) -> None:
        self.worker, self.policy = worker, policy

    def make(self) -> ProducedContribution:
        unit, policy, engine = self.worker.unit, self.policy, cast("Any", self.worker.engine)
        assert unit is not None
        prompts, end = unit.given["prompts"], unit.given["end"]
        drawn = sample(
            engine.task.players["model"],
            _repeated(prompts, policy.group),
            max_new_tokens=policy.length,
            temperature=policy.temperature,
            draws=group_draws(policy.seed, unit.given["first"], prompts, policy.group),
            eos_id=end,
            pad_id=0,
            beside=make_side_texts(
                engine.task.finder, *(_repeated(unit.given.get(name, ()), policy.group) for name in ("contexts", "own"))
            ),
        )
        tokens_BT, weight = tokens_to_send(drawn), int(drawn.real_BT.sum())
        return ProducedContribution(
            tokens_BT, {}, weight, len(tokens_BT), self.worker.weights.version, unit.batches, frames=pack(tokens_BT)
        )

    def on_answer(self, news: RunNews, status: str | None) -> None:
        if status == "inexact":
            self.worker.report(
                "warning: the coordinator gets other tokens from the same weights and draws, and refused this unit: something here "
                "computes otherwise (another precision, a changed program, a faulty machine)"
            )


# --- contribution policies, one of which a strategy chooses -----------------------------------------------------


class WorkerContribution(ContributionPolicy, ABC):
    """A contribution policy with what computes the contributions."""

    @abstractmethod
    def producer(self, worker: ProducerContext, checkpoint: WorkerCheckpoint, spans: tuple[Span, ...]) -> Producer:
        """What computes the contributions. `checkpoint` saves what only the worker knows; `spans`: fragments that rounds take in turn."""


class GradientContribution(WorkerContribution):
    """A worker sends the gradient of every step."""

    def producer(self, worker: ProducerContext, checkpoint: WorkerCheckpoint, spans: tuple[Span, ...]) -> Producer:
        return GradientProducer(worker, self.own_steps)


@dataclass(frozen=True)
class PseudoGradientContribution(WorkerContribution):
    """DiLoCo: a worker takes many inner steps, and sends the pseudo-gradient."""

    takes_inner_steps: bool = True

    def producer(self, worker: ProducerContext, checkpoint: WorkerCheckpoint, spans: tuple[Span, ...]) -> Producer:
        return PseudoGradientProducer(worker, self, checkpoint, spans)


class UnitGradientContribution(WorkerContribution):
    """A worker sends the mean gradient over a unit of the data that it has leased."""

    def producer(self, worker: ProducerContext, checkpoint: WorkerCheckpoint, spans: tuple[Span, ...]) -> Producer:
        return UnitGradientProducer(worker)


@dataclass(frozen=True)
class RolloutContribution(WorkerContribution):
    """A worker sends its answers to the prompts that it has leased."""

    group: int = 1
    """Answers to each prompt."""
    length: int = 32
    """Tokens of the longest answer."""
    temperature: float = 1.0
    seed: int = 0

    def producer(self, worker: ProducerContext, checkpoint: WorkerCheckpoint, spans: tuple[Span, ...]) -> Producer:
        return RolloutProducer(worker, self)
